package io.llamarack.client;

import java.net.http.HttpHeaders;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.function.Function;

/** Turns the bytes of an event stream into typed chunks. */
final class StreamReceiver<T, R> implements Receiver {
    private static final String DONE = "[DONE]";

    private final JsonCodec codec;
    private final Function<Map<String, Object>, T> view;
    private final Accumulator<T, R> accumulator;
    private final EventPipe<T> pipe = new EventPipe<>(this::requestMore);
    private final CompletableFuture<Void> opened = new CompletableFuture<>();
    private final CompletableFuture<R> completion = new CompletableFuture<>();

    private volatile Attempt attempt;
    private volatile HttpHeaders headers;
    private volatile boolean delivered;
    private Runnable firstChunk = () -> {};
    private SseDecoder decoder;
    private boolean done;
    private boolean atEnd;

    StreamReceiver(JsonCodec codec, Function<Map<String, Object>, T> view, Accumulator<T, R> accumulator) {
        this.codec = codec;
        this.view = view;
        this.accumulator = accumulator;
    }

    void onFirstChunk(Runnable listener) {
        firstChunk = listener;
    }

    EventPipe<T> pipe() {
        return pipe;
    }

    /** Complete when the server has accepted the request. */
    CompletableFuture<Void> opened() {
        return opened;
    }

    /** Complete when the last chunk has come. */
    CompletableFuture<R> completion() {
        return completion;
    }

    HttpHeaders headers() {
        return headers;
    }

    R result() {
        return accumulator.result();
    }

    @Override
    public void begin(HttpHeaders newHeaders, Attempt current) {
        String type = newHeaders.firstValue("content-type").orElse("none");
        if (!type.toLowerCase(Locale.ROOT).startsWith("text/event-stream")) {
            throw new MalformedResponseException(
                    "a stream was asked for, but the content type is `" + type + "`", null);
        }
        headers = newHeaders;
        attempt = current;
        decoder = new SseDecoder(SseDecoder.MAX_EVENT_BYTES, this::event);
        pipe.restart();
        pipe.requestIfLow();
        opened.complete(null);
    }

    @Override
    public void bytes(ByteBuffer bytes) {
        decoder.feed(bytes);
    }

    @Override
    public void pause() {
        if (!done) {
            pipe.answered();
            pipe.requestIfLow();
        }
    }

    @Override
    public void end() {
        if (done) {
            return;
        }
        atEnd = true;
        decoder.end();
        if (done) {
            return;
        }
        if (!accumulator.isFinished()) {
            throw truncated(null);
        }
    }

    @Override
    public boolean hasDelivered() {
        return delivered;
    }

    @Override
    public LlamarackException describe(LlamarackException failure) {
        if (failure instanceof CallTimeoutException) {
            CallTimeoutException timeout = (CallTimeoutException) failure;
            return new CallTimeoutException(timeout.phase(), timeout.limit(), accumulator.text(), timeout.getCause());
        }
        boolean broke = failure instanceof TransportException && !(failure instanceof StreamTruncatedException);
        return broke && delivered ? truncated(failure) : failure;
    }

    @Override
    public void succeed() {
        pipe.end();
        completion.complete(accumulator.result());
    }

    @Override
    public void fail(LlamarackException failure) {
        pipe.fail(failure);
        completion.completeExceptionally(failure);
        opened.completeExceptionally(failure);
    }

    private void event(String name, String data) {
        if (done) {
            return;
        }
        if (data.strip().equals(DONE)) {
            done = true;
            attempt.complete();
            return;
        }
        Map<String, Object> value = parse(name, data);
        if (name.equals("error") || value.get("error") != null) {
            throw new StreamErrorException(Errors.parse(200, headers, value), accumulator.text());
        }
        T chunk = view.apply(JsonView.freezeObject(value));
        accumulator.add(chunk);
        if (!delivered) {
            delivered = true;
            firstChunk.run();
        }
        pipe.offer(chunk);
    }

    private Map<String, Object> parse(String name, String data) {
        try {
            return codec.read(data.getBytes(StandardCharsets.UTF_8));
        } catch (Exception notJson) {
            if (name.equals("error")) {
                return Map.of("error", data);
            }
            if (atEnd) {
                throw truncated(notJson);
            }
            throw new MalformedResponseException(
                    "an event of the stream is not a JSON object: " + notJson.getMessage(), notJson);
        }
    }

    private StreamTruncatedException truncated(Throwable cause) {
        return new StreamTruncatedException(
                "the stream broke off: neither a finish reason nor [DONE] came", accumulator.text(), cause);
    }

    private void requestMore() {
        attempt.request();
    }
}
