package io.llamarack.client;

import static io.llamarack.client.GoldenServer.delta;
import static io.llamarack.client.GoldenServer.finish;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

@Timeout(60)
class PublisherTest {
    private static final ChatRequest REQUEST = ChatRequest.of("m", "Hello");

    /** Records signals; requests one more after each item while {@code automatic}. */
    private static class Recorder implements Flow.Subscriber<ChatChunk> {
        final List<String> signals = Collections.synchronizedList(new ArrayList<>());
        final CountDownLatch over = new CountDownLatch(1);
        final boolean automatic;
        volatile Flow.Subscription subscription;

        Recorder(boolean automatic) {
            this.automatic = automatic;
        }

        @Override
        public void onSubscribe(Flow.Subscription newSubscription) {
            subscription = newSubscription;
            if (automatic) {
                newSubscription.request(1);
            }
        }

        @Override
        public void onNext(ChatChunk chunk) {
            signals.add(chunk.text());
            if (automatic) {
                subscription.request(1);
            }
        }

        @Override
        public void onError(Throwable failure) {
            signals.add(failure.getClass().getSimpleName());
            over.countDown();
        }

        @Override
        public void onComplete() {
            signals.add("complete");
            over.countDown();
        }
    }

    @Test
    void everyChunkComesInOrderThenTheEnd() throws Exception {
        String[] events = new String[5001];
        List<String> expected = new ArrayList<>();
        for (int i = 0; i < 5000; i++) {
            events[i] = delta("t" + i);
            expected.add("t" + i);
        }
        events[5000] = finish("stop");
        expected.add("");
        expected.add("complete");
        try (GoldenServer server = new GoldenServer(x -> x.stream(events));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Recorder recorder = new Recorder(true);
            stream.publisher().subscribe(recorder);
            assertTrue(recorder.over.await(30, TimeUnit.SECONDS));
            assertEquals(expected, recorder.signals);
            assertTrue(stream.completion().get(10, TimeUnit.SECONDS).text().endsWith("t4999"));
        }
    }

    @Test
    void nothingComesUnrequested() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), delta("b"), finish("stop")));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Recorder recorder = new Recorder(false);
            stream.publisher().subscribe(recorder);
            stream.completion().get(10, TimeUnit.SECONDS); // all has come from the server
            assertEquals(List.of(), recorder.signals);
            recorder.subscription.request(2);
            assertEquals(List.of("a", "b"), recorder.signals);
            recorder.subscription.request(Long.MAX_VALUE);
            recorder.subscription.request(Long.MAX_VALUE);
            assertEquals(List.of("a", "b", "", "complete"), recorder.signals);
        }
    }

    @Test
    void errorComesAfterTheChunksBeforeIt() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), GoldenServer.error("e", "c")));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Recorder recorder = new Recorder(true);
            stream.publisher().subscribe(recorder);
            assertTrue(recorder.over.await(30, TimeUnit.SECONDS));
            assertEquals(List.of("a", "StreamErrorException"), recorder.signals);
        }
    }

    @Test
    void cancelledSubscriptionReachesTheServerAndIsSilent() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    x.data(delta("a"));
                    x.awaitDisconnect();
                });
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Recorder recorder = new Recorder(false) {
                @Override
                public void onNext(ChatChunk chunk) {
                    super.onNext(chunk);
                    subscription.cancel();
                }
            };
            stream.publisher().subscribe(recorder);
            recorder.subscription.request(10);
            assertTrue(server.sawDisconnect());
            assertEquals(List.of("a"), recorder.signals);
        }
    }

    @Test
    void subscriberThatThrowsGetsItsErrorAndTheServerIsLeft() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> {
                    x.startStream();
                    x.data(delta("a"));
                    x.data(delta("b"));
                    x.awaitDisconnect();
                });
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            Recorder recorder = new Recorder(false) {
                @Override
                public void onNext(ChatChunk chunk) {
                    throw new IllegalStateException("a subscriber that fails");
                }
            };
            stream.publisher().subscribe(recorder);
            recorder.subscription.request(10);
            assertTrue(recorder.over.await(30, TimeUnit.SECONDS));
            assertEquals(List.of("LlamarackException"), recorder.signals);
            assertTrue(server.sawDisconnect());
        }
    }

    @Test
    void secondSubscriberAndResultAreRefused() throws Exception {
        try (GoldenServer server = new GoldenServer(x -> x.stream(delta("a"), finish("stop")));
                LlamarackClient client = server.client().build();
                ChatStream stream = client.streamChat(REQUEST)) {
            stream.publisher().subscribe(new Recorder(false));
            Recorder second = new Recorder(true);
            stream.publisher().subscribe(second);
            assertEquals(List.of("IllegalStateException"), second.signals);
            assertThrows(IllegalStateException.class, stream::result);
        }
    }
}
