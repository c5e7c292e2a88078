package io.llamarack.client;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Parallel streams through a rack, without a thread per stream. Not a test class: run its main method.
 *
 * <pre>java -cp "$(clients/java/build-offline.sh classpath)" io.llamarack.client.LoadTest URL [STREAMS [TOKENS]]</pre>
 *
 * <p>Prints one line; exit code 1 when a stream failed. First-token times include the wait in the queue.
 */
final class LoadTest {
    private final LlamarackClient client;
    private final List<Double> firstTokenSeconds = Collections.synchronizedList(new ArrayList<>());
    private final AtomicInteger retries = new AtomicInteger();

    private LoadTest(String url) {
        client = LlamarackClient.builder().baseUrl(url).apiKey(System.getenv("LLAMARACK_API_KEY"))
                .maxRetries(5)
                .listener(new CallListener() {
                    @Override
                    public void onRetry(CallInfo call, LlamarackException failure, Duration wait) {
                        retries.incrementAndGet();
                    }
                }).build();
    }

    public static void main(String[] arguments) {
        int streams = arguments.length > 1 ? Integer.parseInt(arguments[1]) : 64;
        int tokens = arguments.length > 2 ? Integer.parseInt(arguments[2]) : 32;
        System.exit(new LoadTest(arguments[0]).run(streams, tokens));
    }

    private int run(int streams, int tokens) {
        String model = client.models().get(0).id();
        long start = System.nanoTime();
        List<CompletableFuture<ChatResponse>> answers = new ArrayList<>();
        for (int i = 0; i < streams; i++) {
            answers.add(one(ChatRequest.builder().model(model)
                    .message(Message.user("Tell story number " + i)).maxTokens(tokens).build()));
        }
        int failures = 0;
        long outputTokens = 0;
        for (CompletableFuture<ChatResponse> answer : answers) {
            try {
                outputTokens += answer.join().usage().flatMap(Usage::completionTokens).orElse(0L);
            } catch (CompletionException failed) {
                failures++;
                System.err.println(failed.getCause());
            }
        }
        double seconds = (System.nanoTime() - start) / 1e9;
        Collections.sort(firstTokenSeconds);
        System.out.printf(Locale.ROOT,
                "streams %d  failed %d  retries %d  seconds %.1f  output tokens/s %.1f  first token s p50 %.2f max %.2f%n",
                streams, failures, retries.get(), seconds, outputTokens / seconds, quantile(0.5), quantile(1));
        client.close();
        return failures == 0 ? 0 : 1;
    }

    private CompletableFuture<ChatResponse> one(ChatRequest request) {
        long start = System.nanoTime();
        return client.streamChatAsync(request, CallOptions.none()).thenCompose(stream -> {
            stream.publisher().subscribe(new Flow.Subscriber<>() {
                private boolean any;

                @Override
                public void onSubscribe(Flow.Subscription subscription) {
                    subscription.request(Long.MAX_VALUE);
                }

                @Override
                public void onNext(ChatChunk chunk) {
                    if (!any && !chunk.text().isEmpty()) {
                        any = true;
                        firstTokenSeconds.add((System.nanoTime() - start) / 1e9);
                    }
                }

                @Override
                public void onError(Throwable failure) {} // the completion carries it

                @Override
                public void onComplete() {}
            });
            return stream.completion();
        });
    }

    private double quantile(double q) {
        return firstTokenSeconds.isEmpty()
                ? Double.NaN : firstTokenSeconds.get((int) Math.ceil(q * firstTokenSeconds.size()) - 1);
    }
}
