package io.llamarack.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/**
 * The client against a running rack: LLAMARACK_URL says where, LLAMARACK_API_KEY with which key. Takes the
 * first model the rack serves.
 */
@EnabledIfEnvironmentVariable(named = "LLAMARACK_URL", matches = "http.*",
        disabledReason = "needs a rack: llamarack serve FILE, then LLAMARACK_URL=http://127.0.0.1:8080")
@Timeout(240)
class LiveRackTest {
    private static LlamarackClient client;
    private static String model;

    @BeforeAll
    static void connect() {
        client = LlamarackClient.fromEnv().build();
        model = client.models().get(0).id();
    }

    @AfterAll
    static void close() {
        client.close();
    }

    private static ChatRequest.Builder ask(String text) {
        return ChatRequest.builder().model(model).message(Message.user(text)).temperature(0).seed(1);
    }

    @Test
    void healthAndModelsAnswer() {
        assertTrue(client.health().isReady());
        assertFalse(model.isEmpty());
    }

    @Test
    void streamedAndPlainAnswersAreTheSameWithTheSameUsage() {
        ChatRequest request = ask("Name three colours.").maxTokens(24).build();
        ChatResponse plain = client.chat(request);
        List<String> pieces;
        ChatResponse streamed;
        try (ChatStream stream = client.streamChat(request)) {
            pieces = new ArrayList<>();
            stream.forEach(chunk -> pieces.add(chunk.text()));
            streamed = stream.result();
        }
        assertFalse(plain.text().isEmpty());
        assertEquals(plain.text(), streamed.text());
        assertEquals(plain.text(), String.join("", pieces));
        assertEquals(plain.usage().orElseThrow().totalTokens(), streamed.usage().orElseThrow().totalTokens());
        assertEquals(plain.choices().get(0).finishReason(), streamed.choices().get(0).finishReason());
    }

    @Test
    void completionContinuesTheText() {
        CompletionRequest request = CompletionRequest.builder().model(model)
                .prompt("The capital of France is").maxTokens(8).temperature(0).build();
        String plain = client.complete(request).text();
        assertFalse(plain.isEmpty());
        try (CompletionStream stream = client.streamComplete(request)) {
            assertEquals(plain, stream.textStream().collect(Collectors.joining()));
        }
    }

    @Test
    void tokensAreCounted() {
        TokenizeResponse once = client.tokenize(model, "hello world");
        assertTrue(once.count() >= 2);
        assertEquals(once.tokens().length, once.count());
        assertTrue(client.tokenize(model, "hello world ".repeat(20)).count() > once.count());
    }

    @Test
    void charactersOfFourBytesComeBackWhole() {
        ChatRequest request = ask("Repeat exactly: \uD83E\uDD99\uD83E\uDD99 \u6F22\u5B57").maxTokens(24).build();
        try (ChatStream stream = client.streamChat(request)) {
            String text = stream.textStream().collect(Collectors.joining());
            assertFalse(text.contains("\uFFFD"), text);
        }
    }

    @Test
    void unknownModelIsNotFound() {
        ApiException failure = assertThrows(NotFoundException.class,
                () -> client.chat(ChatRequest.of("no-such-model", "Hello")));
        assertEquals("model_not_found", failure.code().orElseThrow());
    }

    @Test
    void promptOverTheContextIsToldApart() {
        assertThrows(ContextLengthException.class,
                () -> client.chat(ask("word ".repeat(40_000)).maxTokens(1).build()));
    }

    /** Far more work than a CPU does in the time given: passes only when cancelled work really stops. */
    @Test
    void cancelInQueuePrefillAndDecodeFreesTheEngine() {
        ChatRequest endless = ask("Count from 1 to 100000.").maxTokens(3000).field("ignore_eos", true).build();
        ChatRequest longPrompt = ask("one two three four five six seven ".repeat(60))
                .maxTokens(3000).field("ignore_eos", true).build();
        for (int round = 0; round < 2; round++) {
            List<CompletableFuture<ChatStream>> calls = new ArrayList<>();
            try (ChatStream decoding = client.streamChat(endless)) {
                decoding.iterator().next();
                for (int i = 0; i < 12; i++) {
                    calls.add(client.streamChatAsync(i % 2 == 0 ? longPrompt : endless, CallOptions.none()));
                }
                calls.get(0).join(); // accepted: some others are decoding or in prefill now, the rest wait
            }
            for (CompletableFuture<ChatStream> call : calls) {
                if (!call.cancel(true)) {
                    call.join().close();
                }
            }
        }
        CallOptions soon = CallOptions.none().withDeadline(Duration.ofSeconds(60));
        assertFalse(client.chat(ask("Hi").maxTokens(4).build(), soon).text().isEmpty());
    }

    @Test
    void sixteenDialoguesAtOnceAreAllAnswered() {
        List<CompletableFuture<ChatResponse>> answers = IntStream.range(0, 16)
                .mapToObj(i -> client.chatAsync(ask("Say " + i).maxTokens(4).build(), CallOptions.none()))
                .collect(Collectors.toList());
        List<String> texts = Collections.synchronizedList(new ArrayList<>());
        answers.forEach(answer -> texts.add(answer.join().text()));
        assertEquals(16, texts.size());
    }
}
