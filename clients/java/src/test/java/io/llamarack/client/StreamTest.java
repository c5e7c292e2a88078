package io.llamarack.client;

import static io.llamarack.client.GoldenServer.delta;
import static io.llamarack.client.GoldenServer.finish;
import static io.llamarack.client.GoldenServer.usage;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class StreamTest {
    private static final ChatRequest REQUEST = ChatRequest.of("m", "Hello");

    private static String text(GoldenServer server) {
        try (LlamarackClient client = server.client().build(); ChatStream stream = client.streamChat(REQUEST)) {
            return stream.textStream().collect(Collectors.joining());
        }
    }

    @Test
    void chunksUsageAndResultAreTyped() throws Exception {
        try (GoldenServer server = new GoldenServer(
                        x -> x.stream(delta(""), delta("Hel"), delta("lo"), finish("stop"), usage(9, 2)));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Iterator<ChatChunk> chunks = stream.iterator();
            chunks.next();
            assertEquals("Hel", chunks.next().text());
            ChatResponse result = stream.result();
            assertEquals("Hello", result.text());
            assertEquals("stop", result.choices().get(0).finishReason().orElseThrow());
            assertEquals(11, result.usage().orElseThrow().totalTokens());
            assertEquals(result, stream.completion().get(10, TimeUnit.SECONDS));
            assertFalse(chunks.hasNext());
        }
    }

    @Test
    void requestIsHttp11WithLengthAndWithoutAnUpgradeOffer() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), finish("stop")));
                LlamarackClient client = server.client().apiKey("secret").build();
                ChatStream stream = client.streamChat(REQUEST)) {
            stream.result();
            GoldenServer.Request request = server.requests.get(0);
            assertEquals("POST /v1/chat/completions HTTP/1.1", request.line);
            assertFalse(request.headers.containsKey("upgrade"));
            assertFalse(request.headers.containsKey("transfer-encoding"));
            assertEquals("text/event-stream", request.headers.get("accept"));
            assertEquals("identity", request.headers.get("accept-encoding"));
            assertEquals("Bearer secret", request.headers.get("authorization"));
            Map<String, Object> body = new JacksonCodec().read(request.body.getBytes(StandardCharsets.UTF_8));
            assertEquals(true, body.get("stream"));
            assertEquals(Map.of("include_usage", true), body.get("stream_options"));
        }
    }

    @Test
    void byteAtATimeWithSplitCharactersIsWhole() throws Exception {
        String llama = "\uD83E\uDD99\u6F22";
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream();
            String all = "\uFEFF: ka\r\n\r\ndata: " + delta(llama) + "\r\n\r\ndata: " + finish("stop")
                    + "\n\ndata: [DONE]\n\n";
            for (byte b : all.getBytes(StandardCharsets.UTF_8)) {
                x.chunk(new byte[] {b});
            }
            x.endStream();
        })) {
            assertEquals(llama, text(server));
        }
    }

    @Test
    void heartbeatsOddFieldsAndMultiLineDataAreRead() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream();
            x.chunk(": ka\n\n: no empty line\nid: 1\nretry: 3\nevent: ping\n\n");
            x.chunk("data:" + delta("a").replace(",", ",\ndata: ") + "\n\n");
            x.data(finish("stop"));
            x.data("[DONE]");
            x.endStream();
        })) {
            assertEquals("a", text(server));
        }
    }

    @Test
    void errorEventKeepsThePartialTextAndCode() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream("x-request-id: r-7");
            x.data(delta("par"));
            x.chunk("event: error\ndata: " + GoldenServer.error("engine died", "upstream_failed") + "\n\n");
            x.endStream();
        })) {
            StreamErrorException failure = assertThrows(StreamErrorException.class, () -> text(server));
            assertEquals("par", failure.partialText());
            assertEquals("upstream_failed", failure.code().orElseThrow());
            assertEquals("r-7", failure.requestId().orElseThrow());
            assertEquals("engine died (code upstream_failed)", failure.getMessage());
            assertEquals(1, server.requests.size());
        }
    }

    @Test
    void errorWithoutAnEventNameIsAnErrorAndANullErrorIsNot() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), "{\"error\":{\"message\":\"broken\"}}"))) {
            assertEquals("broken", assertThrows(StreamErrorException.class, () -> text(server)).getMessage());
        }
        try (GoldenServer server = new GoldenServer(x -> x.stream(
                delta("a").replaceFirst("\\{", "{\"error\":null,"), finish("stop")))) {
            assertEquals("a", text(server));
        }
    }

    @Test
    void streamThatEndsBeforeItsFinishReasonIsTruncated() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream();
            x.data(delta("par"));
            x.endStream();
        })) {
            StreamTruncatedException failure = assertThrows(StreamTruncatedException.class, () -> text(server));
            assertEquals("par", failure.partialText());
            assertEquals(1, server.requests.size());
        }
    }

    @Test
    void connectionThatBreaksInTheAnswerIsTruncatedAndNotRetried() throws Exception {
        CountDownLatch read = new CountDownLatch(1); // a reset may overtake bytes that nobody has read
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    x.data(delta("par"));
                    read.await();
                    x.reset();
                });
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Iterator<ChatChunk> chunks = stream.iterator();
            chunks.next();
            read.countDown();
            StreamTruncatedException failure = assertThrows(StreamTruncatedException.class, chunks::hasNext);
            assertEquals("par", failure.partialText());
            assertTrue(failure.getCause() instanceof TransportException);
            assertEquals(1, server.requests.size());
        }
    }

    @Test
    void finishReasonWithoutDoneIsComplete() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream();
            x.data(delta("a"));
            x.chunk("data: " + finish("stop")); // not even a line end
            x.endStream();
        })) {
            assertEquals("a", text(server));
        }
    }

    @Test
    void oneOfTwoAnswersUnfinishedIsTruncated() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream();
            x.data(delta("a"));
            x.data(delta("b").replace("\"index\":0", "\"index\":1"));
            x.data(finish("stop"));
            x.endStream();
        })) {
            assertThrows(StreamTruncatedException.class, () -> text(server));
        }
    }

    @Test
    void connectionHeldOpenAfterDoneHoldsNobodyBack() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
            x.startStream();
            x.data(delta("a"));
            x.data(finish("stop"));
            x.data("[DONE]");
            x.awaitDisconnect();
        })) {
            try (LlamarackClient client = server.client().build(); ChatStream stream = client.streamChat(REQUEST)) {
                assertEquals("a", stream.result().text());
                assertTrue(server.sawDisconnect(), "the connection is given up when its body does not end");
            }
        }
    }

    @Test
    void connectionIsKeptWhenTheBodyEndsSoonAfterDone() throws Exception {
        int streams = 6;
        Semaphore ended = new Semaphore(0);
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    x.data(delta("a"));
                    x.data(finish("stop"));
                    x.data("[DONE]");
                    Thread.sleep(20); // so that the end is not in the same read
                    x.endStream();
                    ended.release();
                });
                LlamarackClient client = server.client().build()) {
            for (int i = 0; i < streams; i++) {
                try (ChatStream stream = client.streamChat(REQUEST)) {
                    assertEquals("a", stream.result().text());
                }
                ended.acquire();
                Thread.sleep(100); // for the connection to go back to the pool; no event tells
            }
            // One, but for a machine so busy that 100 ms are too short; as many as streams when none is kept.
            assertTrue(server.connections.get() < streams, "connections: " + server.connections.get());
        }
    }

    @Test
    void toolCallFragmentsArePutTogetherByIndex() throws Exception {
        String frame = "{\"id\":\"c1\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[%s]},"
                + "\"finish_reason\":null}]}";
        try (GoldenServer server = new GoldenServer(x -> x.stream(
                        String.format(frame, "{\"index\":0,\"id\":\"t0\",\"type\":\"function\",\"function\":"
                                + "{\"name\":\"add\",\"arguments\":\"\"}}"),
                        String.format(frame, "{\"index\":0,\"function\":{\"arguments\":\"{\\\"a\\\":\"}}"),
                        String.format(frame, "{\"index\":1,\"id\":\"t1\",\"function\":{\"name\":\"now\",\"arguments\":\"{}\"}}"),
                        String.format(frame, "{\"index\":0,\"function\":{\"arguments\":\"1}\"}}"),
                        finish("tool_calls")));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Message message = stream.result().choices().get(0).message();
            assertEquals("", message.text().orElse(""));
            assertEquals(List.of("t0", "t1"),
                    message.toolCalls().stream().map(ToolCall::id).collect(Collectors.toList()));
            assertEquals("add", message.toolCalls().get(0).name());
            assertEquals("{\"a\":1}", message.toolCalls().get(0).arguments());
        }
    }

    @Test
    @Timeout(180)
    void hundredThousandChunksStayInFlatMemoryAndWaitForASlowReader() throws Exception {
        int count = 100_000;
        int perWrite = 20;
        AtomicInteger written = new AtomicInteger();
        // 150 MB in all, in a heap of 96 MiB (pom.xml): read ahead, it cannot be held.
        String padded = "{\"pad\":\"" + "x".repeat(1350) + "\"," + delta("tok ").substring(1);
        String events = ("data: " + padded + "\n\n").repeat(perWrite);
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    for (int i = 0; i < count; i += perWrite) {
                        x.chunk(events);
                        written.addAndGet(perWrite);
                    }
                    x.data(finish("length"));
                    x.data("[DONE]");
                    x.endStream();
                });
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            int before = 0;
            // Written nothing for 3 s: on a busy machine a shorter rest is not yet a full buffer.
            for (int rests = 0; rests < 6; rests = before == written.get() && before > 0 ? rests + 1 : 0) {
                before = written.get();
                Thread.sleep(500);
            }
            assertTrue(before < count, "the client took the stream though nobody read it");
            assertEquals(count, stream.textStream().count());
        }
    }

    @Test
    void jsonInsteadOfAStreamIsMalformed() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(200, GoldenServer.answer("a")))) {
            MalformedResponseException failure = assertThrows(MalformedResponseException.class, () -> text(server));
            assertTrue(failure.getMessage().contains("application/json"), failure.getMessage());
        }
    }

    @Test
    void eventThatIsNotJsonIsMalformedAfterTheChunksBeforeIt() throws Exception {
        List<String> seen = new ArrayList<>();
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), "{oops"));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            assertThrows(MalformedResponseException.class, () -> stream.forEach(chunk -> seen.add(chunk.text())));
        }
        assertEquals(List.of("a"), seen);
    }

    @Test
    void secondReaderIsRefused() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), finish("stop")));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            stream.iterator();
            assertThrows(IllegalStateException.class, stream::iterator);
        }
    }

    @Test
    void completionStreamIsTypedToo() throws Exception {
        String frame = "{\"id\":\"c\",\"object\":\"text_completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
                + "\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s}]}";
        try (GoldenServer server = new GoldenServer(
                        x -> x.stream(String.format(frame, "on", "null"), String.format(frame, "ce", "\"stop\"")));
                LlamarackClient client = server.client().build();
                CompletionStream stream =
                        client.streamComplete(CompletionRequest.builder().model("m").prompt("p").build())) {
            assertEquals("once", stream.result().text());
            assertEquals("POST /v1/completions HTTP/1.1", server.requests.get(0).line);
        }
    }
}
