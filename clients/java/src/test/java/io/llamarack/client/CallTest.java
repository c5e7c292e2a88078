package io.llamarack.client;

import static io.llamarack.client.GoldenServer.answer;
import static io.llamarack.client.GoldenServer.delta;
import static io.llamarack.client.GoldenServer.error;
import static io.llamarack.client.GoldenServer.finish;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.logging.Level;
import java.util.logging.Logger;
import java.util.stream.Collectors;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class CallTest {
    private static final ChatRequest REQUEST = ChatRequest.of("m", "Hello");

    @Test
    void chatAnswerIsTyped() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(200, answer("Hi \uD83E\uDD99")));
                LlamarackClient client = server.client().build()) {
            ChatResponse response = client.chat(ChatRequest.builder().model("m")
                    .message(Message.system("Be brief"))
                    .message(Message.user("Say \"hi\"\n"))
                    .maxTokens(5).temperature(0).field("top_k", 1).build());
            assertEquals("Hi \uD83E\uDD99", response.text());
            assertEquals(3, response.usage().orElseThrow().promptTokens());
            assertEquals("assistant", response.choices().get(0).message().role());
            assertEquals("{\"model\":\"m\",\"max_tokens\":5,\"temperature\":0.0,\"top_k\":1,\"messages\":["
                    + "{\"role\":\"system\",\"content\":\"Be brief\"},"
                    + "{\"role\":\"user\",\"content\":\"Say \\\"hi\\\"\\n\"}]}", server.requests.get(0).body);
        }
    }

    @Test
    void otherEndpointsAreTyped() throws Exception {
        Map<String, String> answers = Map.of(
                "GET /v1/models HTTP/1.1", "{\"data\":[{\"id\":\"a/b\",\"max_model_len\":4096},{\"id\":\"c\"}]}",
                "POST /tokenize HTTP/1.1", "{\"tokens\":[1,22,333]}",
                "GET /health HTTP/1.1", "{\"status\":\"ok\"}",
                // 1.0f, -2.5f little-endian
                "POST /v1/embeddings HTTP/1.1", "{\"model\":\"m\",\"data\":[{\"embedding\":\"AACAPwAAIMA=\"},"
                        + "{\"embedding\":[0.5,3]}]}",
                "POST /v1/completions HTTP/1.1", "{\"id\":\"c\",\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"xyz\","
                        + "\"finish_reason\":\"length\"}]}");
        try (GoldenServer server = new GoldenServer(x -> x.json(200, answers.get(x.request.line)));
                LlamarackClient client = server.client().build()) {
            List<ModelInfo> models = client.models();
            assertEquals("a/b", models.get(0).id());
            assertEquals(4096, models.get(0).maxContextTokens().orElseThrow());
            assertTrue(models.get(1).maxContextTokens().isEmpty());
            assertArrayEquals(new int[] {1, 22, 333}, client.tokenize("m", "text").tokens());
            assertEquals(3, client.tokenize("m", "text").count());
            assertTrue(client.health().isReady());
            List<float[]> vectors = client.embed(
                    EmbeddingRequest.builder().model("m").input(List.of("a", "b")).build()).vectors();
            assertArrayEquals(new float[] {1f, -2.5f}, vectors.get(0));
            assertArrayEquals(new float[] {0.5f, 3f}, vectors.get(1));
            assertEquals("xyz", client.complete(CompletionRequest.builder().model("m").prompt("p").build()).text());
        }
    }

    @Test
    void loadingServerIsUnhealthyNotAnException() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(503, error("loading", "model_not_ready")));
                LlamarackClient client = server.client().build()) {
            Health health = client.health();
            assertFalse(health.isReady());
            assertEquals(503, health.status());
            assertTrue(health.raw().containsKey("error"));
            assertEquals(1, server.requests.size());
        }
    }

    @Test
    void statusesBecomeTheirExceptions() throws Exception {
        Map<Integer, Class<? extends ApiException>> expected = Map.of(
                400, BadRequestException.class, 401, AuthenticationException.class,
                403, PermissionDeniedException.class, 404, NotFoundException.class,
                422, BadRequestException.class, 429, RateLimitedException.class,
                500, ServerErrorException.class, 503, OverloadedException.class,
                504, ServerErrorException.class);
        for (Map.Entry<Integer, Class<? extends ApiException>> entry : expected.entrySet()) {
            try (GoldenServer server = new GoldenServer(x -> x.json(entry.getKey(), error("no", "why"),
                            "x-request-id: r-1", "Retry-After: 3"));
                    LlamarackClient client = server.client().maxRetries(0).build()) {
                for (boolean stream : List.of(false, true)) {
                    ApiException failure = assertThrows(ApiException.class,
                            () -> { if (stream) { client.streamChat(REQUEST).close(); } else { client.chat(REQUEST); } });
                    assertEquals(entry.getValue(), failure.getClass());
                    assertEquals(entry.getKey(), failure.status());
                    assertEquals("why", failure.code().orElseThrow());
                    assertEquals("server_error", failure.type().orElseThrow());
                    assertEquals("r-1", failure.requestId().orElseThrow());
                    assertEquals(Duration.ofSeconds(3), failure.retryAfter().orElseThrow());
                    assertEquals(entry.getKey() + ": no (code why) [request r-1]", failure.getMessage());
                }
            }
        }
    }

    @Test
    void contextLengthIsToldFromOtherBadRequests() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(400, x.number == 1
                        ? error("too long", "context_length_exceeded")
                        : "{\"error\":{\"code\":400,\"message\":\"m\",\"type\":\"exceed_context_size_error\"}}"));
                LlamarackClient client = server.client().build()) {
            assertThrows(ContextLengthException.class, () -> client.chat(REQUEST));
            assertThrows(ContextLengthException.class, () -> client.chat(REQUEST));
        }
    }

    @Test
    void pageOfAProxyIsShownInTheMessage() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(502, "<html>Bad Gateway</html>"));
                LlamarackClient client = server.client().maxRetries(0).build()) {
            ApiException failure = assertThrows(ServerErrorException.class, () -> client.chat(REQUEST));
            assertEquals("502: <html>Bad Gateway</html>", failure.getMessage());
        }
    }

    @Test
    void overloadIsRetriedWithOneKeyAndACount() throws Exception {
        for (boolean stream : List.of(false, true)) {
            try (GoldenServer server = new GoldenServer(x -> {
                        if (x.number < 3) {
                            x.json(x.number == 1 ? 503 : 429, error("busy", "server_is_overloaded"), "retry-after-ms: 1");
                        } else if (stream) {
                            x.stream(delta("ok"), finish("stop"));
                        } else {
                            x.json(200, answer("ok"));
                        }
                    });
                    LlamarackClient client = server.client().build()) {
                assertEquals("ok", stream ? client.streamChat(REQUEST).result().text() : client.chat(REQUEST).text());
                assertEquals(List.of("0", "1", "2"), header(server, "x-stainless-retry-count"));
                assertEquals(1, header(server, "idempotency-key").stream().distinct().count());
            }
        }
    }

    @Test
    void eachCallHasItsOwnKey() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(200, answer("ok")));
                LlamarackClient client = server.client().build()) {
            client.chat(REQUEST);
            client.chat(REQUEST);
            List<String> keys = header(server, "idempotency-key");
            assertNotEquals(keys.get(0), keys.get(1));
        }
    }

    @Test
    void retriesEndAndServerMayForbidThem() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(503, error("busy", "b"), "retry-after-ms: 1"));
                LlamarackClient client = server.client().build()) {
            assertThrows(OverloadedException.class, () -> client.chat(REQUEST));
            assertEquals(3, server.requests.size());
        }
        try (GoldenServer server = new GoldenServer(x -> x.json(503, error("busy", "b"), "x-should-retry: false"));
                LlamarackClient client = server.client().build()) {
            assertThrows(OverloadedException.class, () -> client.chat(REQUEST));
            assertEquals(1, server.requests.size());
        }
    }

    @Test
    void connectionClosedOrResetBeforeTheAnswerIsRetried() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    if (x.number == 1) {
                        x.socket.close();
                    } else if (x.number == 2) {
                        x.reset();
                    } else {
                        x.json(200, answer("ok"));
                    }
                });
                LlamarackClient client = server.client().build()) {
            assertEquals("ok", client.chat(REQUEST).text());
            assertEquals(3, server.requests.size());
        }
    }

    @Test
    void acceptedStreamThatBreaksBeforeItsFirstEventIsRetried() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    if (x.number == 1) {
                        x.startStream();
                        x.chunk(": ka\n\n");
                        x.reset();
                    } else {
                        x.stream(delta("ok"), finish("stop"));
                    }
                });
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            assertEquals("ok", stream.result().text());
            assertEquals(2, server.requests.size());
        }
    }

    @Test
    void overloadToldAsTheFirstEventIsRetriedButNotLaterOrForOtherCodes() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    if (x.number == 1) {
                        x.startStream();
                        x.chunk(": ka\n\nevent: error\ndata: " + error("no room", "server_is_overloaded") + "\n\n");
                        x.endStream();
                    } else {
                        x.stream(delta("ok"), finish("stop"));
                    }
                });
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            assertEquals("ok", stream.result().text());
            assertEquals(2, server.requests.size());
        }
        for (String[] events : new String[][] {
            {delta("a"), error("no room", "server_is_overloaded")}, {error("bad prompt", "engine_bug")}
        }) {
            try (GoldenServer server = new GoldenServer(x -> x.stream(events));
                    LlamarackClient client = server.client().build();
                    ChatStream stream = client.streamChat(REQUEST)) {
                assertThrows(StreamErrorException.class, stream::result);
                assertEquals(1, server.requests.size());
            }
        }
    }

    @Test
    void nobodyListeningIsATransportException() throws Exception {
        String url;
        try (GoldenServer server = new GoldenServer(x -> { })) {
            url = server.url();
        }
        AtomicInteger retries = new AtomicInteger();
        CallListener listener = new CallListener() {
            @Override
            public void onRetry(CallInfo call, LlamarackException failure, Duration wait) {
                retries.incrementAndGet();
            }
        };
        try (LlamarackClient client = LlamarackClient.builder().baseUrl(url).listener(listener).build()) {
            assertThrows(TransportException.class, () -> client.chat(REQUEST));
            assertEquals(2, retries.get());
        }
    }

    @Test
    void listenerHearsTheCallInOrderAndItsFailuresAreDropped() throws Exception {
        Logger log = Logger.getLogger("io.llamarack.client"); // held, or the level is collected with it
        log.setLevel(Level.OFF);
        List<String> heard = Collections.synchronizedList(new ArrayList<>());
        CallListener listener = new CallListener() {
            @Override
            public void onStart(CallInfo call) {
                heard.add("start " + call.operation() + " " + call.model());
                throw new IllegalStateException("a listener that fails");
            }

            @Override
            public void onRetry(CallInfo call, LlamarackException failure, Duration wait) {
                heard.add("retry " + failure.getClass().getSimpleName());
            }

            @Override
            public void onFirstChunk(CallInfo call, Duration sinceStart) {
                heard.add("first chunk");
            }

            @Override
            public void onEnd(CallInfo call, Duration sinceStart, LlamarackException failure) {
                heard.add("end " + call.requestId().orElse("-") + " " + failure);
            }
        };
        try (GoldenServer server = new GoldenServer(x -> {
                    if (x.number == 1) {
                        x.json(503, error("busy", "b"), "retry-after-ms: 1");
                    } else {
                        x.startStream("x-request-id: r-2");
                        x.data(delta("a"));
                        x.data(finish("stop"));
                        x.data("[DONE]");
                        x.endStream();
                    }
                });
                LlamarackClient client = server.client().listener(listener).build();
                ChatStream stream = client.streamChat(REQUEST)) {
            assertEquals("r-2", stream.requestId().orElseThrow());
            stream.result();
        }
        assertEquals(List.of("start chat m", "retry OverloadedException", "first chunk", "end r-2 null"), heard);
        log.setLevel(null);
    }

    @Test
    void headersOfTheCallReplaceTheClients() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(200, answer("ok")));
                LlamarackClient client = server.client().header("x-tenant", "a").build()) {
            client.chat(REQUEST);
            client.chat(REQUEST, CallOptions.none().withHeader("X-Tenant", "b"));
            assertEquals(List.of("a", "b"), header(server, "x-tenant"));
        }
    }

    @Test
    void baseUrlIsTakenWithAndWithoutV1() {
        for (String url : List.of("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/")) {
            assertEquals("http://h:1/v1/models", Endpoint.of(url).api("/models").toString(), url);
            assertEquals("http://h:1/health", Endpoint.of(url).server("/health").toString(), url);
        }
        assertEquals("https://h/llm/v1/models", Endpoint.of("https://h/llm/v1").api("/models").toString());
        assertThrows(IllegalArgumentException.class, () -> Endpoint.of("localhost:8080"));
        assertThrows(IllegalArgumentException.class, () -> Endpoint.of(null));
    }

    @Test
    void incompleteRequestSaysWhatIsMissing() {
        assertTrue(assertThrows(IllegalArgumentException.class, () -> ChatRequest.builder().model("m").build())
                .getMessage().contains("`messages`"));
        assertTrue(assertThrows(IllegalArgumentException.class, () -> CompletionRequest.builder().prompt("p").build())
                .getMessage().contains("`model`"));
        assertThrows(IllegalArgumentException.class, () -> CallOptions.none().withDeadline(Duration.ZERO));
    }

    @Test
    void requestsAndAnswersCannotBeChanged() {
        List<String> stop = new ArrayList<>(List.of("x"));
        ChatRequest request = ChatRequest.builder().model("m").message(Message.user("a")).stop(stop).build();
        stop.add("y");
        assertEquals(List.of("x"), request.raw().get("stop"));
        assertThrows(UnsupportedOperationException.class, () -> request.raw().clear());
        assertThrows(UnsupportedOperationException.class, () -> ((List<?>) request.raw().get("messages")).clear());
    }

    private static List<String> header(GoldenServer server, String name) {
        return server.requests.stream().map(request -> request.headers.get(name)).collect(Collectors.toList());
    }
}
