package io.llamarack.client;

import static io.llamarack.client.GoldenServer.answer;
import static io.llamarack.client.GoldenServer.delta;
import static io.llamarack.client.GoldenServer.finish;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.llamarack.client.CallTimeoutException.Phase;
import java.time.Duration;
import java.util.Iterator;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class LimitsAndCancelTest {
    private static final ChatRequest REQUEST = ChatRequest.of("m", "Hello");
    private static final Duration SHORT = Duration.ofMillis(500);
    private static final Duration LONG = Duration.ofSeconds(50);

    /** Never answers; knows when the client has gone. */
    private static GoldenServer silent() {
        return new GoldenServer(GoldenServer.Exchange::awaitDisconnect);
    }

    /** Answers with headers and two chunks, then nothing. */
    private static GoldenServer stalling() {
        return new GoldenServer(x -> {
            x.startStream();
            x.data(delta("par"));
            x.data(delta("tial"));
            x.awaitDisconnect();
        });
    }

    @Test
    void silentServerPassesTheFirstByteLimitAndIsNotAskedAgain() throws Exception {
        try (GoldenServer server = silent();
                LlamarackClient client = server.client().firstByteTimeout(SHORT).idleTimeout(LONG).build()) {
            CallTimeoutException failure = assertThrows(CallTimeoutException.class, () -> client.chat(REQUEST));
            assertEquals(Phase.FIRST_BYTE, failure.phase());
            assertEquals("FIRST_BYTE limit of 0.5 s passed", failure.getMessage());
            assertTrue(server.sawDisconnect());
            assertEquals(1, server.requests.size());
        }
    }

    @Test
    void acceptedButSilentStreamPassesTheFirstByteLimit() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    x.awaitDisconnect();
                });
                LlamarackClient client = server.client().firstByteTimeout(SHORT).idleTimeout(LONG).build();
                ChatStream stream = client.streamChat(REQUEST)) {
            CallTimeoutException failure = assertThrows(CallTimeoutException.class, stream::result);
            assertEquals(Phase.FIRST_BYTE, failure.phase());
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void stalledStreamPassesTheIdleLimitWithItsPartialText() throws Exception {
        try (GoldenServer server = stalling();
                LlamarackClient client = server.client().idleTimeout(SHORT).build();
                ChatStream stream = client.streamChat(REQUEST)) {
            CallTimeoutException failure = assertThrows(CallTimeoutException.class, stream::result);
            assertEquals(Phase.IDLE, failure.phase());
            assertEquals("partial", failure.partialText());
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void stalledBodyOfAPlainAnswerPassesTheIdleLimit() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    x.chunk("{\"id\":");
                    x.awaitDisconnect();
                });
                LlamarackClient client = server.client().idleTimeout(SHORT).build()) {
            CallTimeoutException failure = assertThrows(CallTimeoutException.class, () -> client.chat(REQUEST));
            assertEquals(Phase.IDLE, failure.phase());
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void heartbeatsHoldOffTheIdleLimit() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    for (int i = 0; i < 60; i++) {
                        x.chunk(": ka\n\n");
                        Thread.sleep(50);
                    }
                    x.data(delta("late"));
                    x.data(finish("stop"));
                    x.data("[DONE]");
                    x.endStream();
                });
                LlamarackClient client = server.client().idleTimeout(Duration.ofSeconds(2)).build();
                ChatStream stream = client.streamChat(REQUEST)) {
            assertEquals("late", stream.result().text());
        }
    }

    @Test
    void slowReaderIsNotTakenForASlowServer() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    for (int i = 0; i < 2000; i++) {
                        x.data(delta("tok "));
                    }
                    x.data(finish("stop"));
                    x.data("[DONE]");
                    x.endStream();
                });
                LlamarackClient client = server.client()
                        .firstByteTimeout(Duration.ofSeconds(1)).idleTimeout(Duration.ofSeconds(1)).build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Iterator<ChatChunk> chunks = stream.iterator();
            chunks.next();
            Thread.sleep(2500);
            assertEquals(2000 * 4, stream.result().text().length());
        }
    }

    @Test
    void deadlineCoversAttemptsAndIsToldToTheServer() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.json(503, "{}", "Retry-After: 100"));
                LlamarackClient client = server.client().build()) {
            // A retry that would begin after the deadline is not waited for.
            assertThrows(OverloadedException.class,
                    () -> client.chat(REQUEST, CallOptions.none().withDeadline(Duration.ofSeconds(30))));
            double seconds = Double.parseDouble(server.requests.get(0).headers.get("x-stainless-timeout"));
            assertTrue(seconds > 20 && seconds <= 30, "seconds: " + seconds);
        }
    }

    @Test
    void deadlineEndsAStreamThatIsAlive() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    while (true) {
                        x.data(delta("x"));
                        Thread.sleep(20);
                    }
                });
                LlamarackClient client = server.client().deadline(Duration.ofSeconds(3)).build();
                ChatStream stream = client.streamChat(REQUEST)) {
            CallTimeoutException failure = assertThrows(CallTimeoutException.class, stream::result);
            assertEquals(Phase.DEADLINE, failure.phase());
            assertTrue(failure.partialText().startsWith("x"));
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void addressThatDoesNotAnswerPassesTheConnectLimit() {
        // 1 ns: no handshake is that fast, so no address outside this machine is needed.
        try (GoldenServer server = silent();
                LlamarackClient client = server.client().connectTimeout(Duration.ofNanos(1)).maxRetries(0).build()) {
            CallTimeoutException failure = assertThrows(CallTimeoutException.class, () -> client.chat(REQUEST));
            assertEquals(Phase.CONNECT, failure.phase());
        } catch (java.io.IOException closing) {
            throw new java.io.UncheckedIOException(closing);
        }
    }

    @Test
    void futureCancelledBeforeTheHeadersReachesTheServer() throws Exception {
        try (GoldenServer server = silent(); LlamarackClient client = server.client().build()) {
            for (CompletableFuture<?> future : new CompletableFuture<?>[] {
                client.chatAsync(REQUEST, CallOptions.none()), client.streamChatAsync(REQUEST, CallOptions.none())
            }) {
                awaitRequests(server, 1);
                future.cancel(true);
            }
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void futureThatTimesOutByItselfReachesTheServer() throws Exception {
        try (GoldenServer server = silent(); LlamarackClient client = server.client().build()) {
            CompletableFuture<ChatResponse> future = client.chatAsync(REQUEST, CallOptions.none())
                    .orTimeout(SHORT.toMillis(), TimeUnit.MILLISECONDS);
            assertThrows(CompletionException.class, future::join);
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void interruptWhileWaitingReachesTheServer() throws Exception {
        try (GoldenServer server = silent(); LlamarackClient client = server.client().build()) {
            AtomicReference<Throwable> thrown = new AtomicReference<>();
            AtomicReference<Boolean> flag = new AtomicReference<>();
            Thread thread = new Thread(() -> {
                thrown.set(assertThrows(CallCancelledException.class, () -> client.chat(REQUEST)));
                flag.set(Thread.currentThread().isInterrupted());
            });
            thread.start();
            awaitRequests(server, 1);
            thread.interrupt();
            thread.join();
            assertEquals(CallCancelledException.class, thrown.get().getClass());
            assertEquals(true, flag.get(), "the interrupt is kept for the caller");
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void closeOfAnUnfinishedStreamReachesTheServer() throws Exception {
        try (GoldenServer server = stalling(); LlamarackClient client = server.client().build()) {
            try (ChatStream stream = client.streamChat(REQUEST)) {
                stream.iterator().next();
            }
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void cancelFromAnotherThreadWakesTheReader() throws Exception {
        try (GoldenServer server = stalling();
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Iterator<ChatChunk> chunks = stream.iterator();
            chunks.next();
            chunks.next();
            CompletableFuture<Void> cancel = CompletableFuture.runAsync(
                    stream::cancel, CompletableFuture.delayedExecutor(200, TimeUnit.MILLISECONDS));
            assertThrows(CallCancelledException.class, chunks::hasNext);
            cancel.join();
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void closedClientEndsItsCallsAndTakesNoMore() throws Exception {
        try (GoldenServer server = silent()) {
            LlamarackClient client = server.client().build();
            CompletableFuture<ChatResponse> future = client.chatAsync(REQUEST, CallOptions.none());
            awaitRequests(server, 1);
            client.close();
            assertEquals(CallCancelledException.class,
                    assertThrows(CompletionException.class, future::join).getCause().getClass());
            assertTrue(server.sawDisconnect());
            assertThrows(CallCancelledException.class, () -> client.chat(REQUEST));
        }
    }

    @Test
    void cancelledCallDoesNotSpoilTheNextOne() throws Exception {
        CountDownLatch first = new CountDownLatch(1);
        try (GoldenServer server = new GoldenServer(x -> {
                    if (x.number == 1) {
                        first.countDown();
                        x.awaitDisconnect();
                    } else {
                        x.json(200, answer("ok"));
                    }
                });
                LlamarackClient client = server.client().build()) {
            CompletableFuture<ChatResponse> cancelled = client.chatAsync(REQUEST, CallOptions.none());
            assertTrue(first.await(10, TimeUnit.SECONDS));
            cancelled.cancel(true);
            assertEquals("ok", client.chat(REQUEST).text());
        }
    }

    private static void awaitRequests(GoldenServer server, int count) throws InterruptedException {
        while (server.requests.size() < count) {
            Thread.sleep(5);
        }
    }
}
