package io.llamarack.client;

import java.io.ByteArrayOutputStream;
import java.net.http.HttpHeaders;
import java.nio.ByteBuffer;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.function.Function;

/** Collects one JSON answer. */
final class UnaryReceiver<T> implements Receiver {
    private final JsonCodec codec;
    private final Function<Map<String, Object>, T> view;
    private final CompletableFuture<T> answer = new CompletableFuture<>();
    private final ByteArrayOutputStream body = new ByteArrayOutputStream();
    private Attempt attempt;
    private T value;

    UnaryReceiver(JsonCodec codec, Function<Map<String, Object>, T> view) {
        this.codec = codec;
        this.view = view;
    }

    CompletableFuture<T> answer() {
        return answer;
    }

    @Override
    public void begin(HttpHeaders headers, Attempt current) {
        body.reset();
        attempt = current;
        current.request();
    }

    @Override
    public void bytes(ByteBuffer bytes) {
        byte[] copy = new byte[bytes.remaining()];
        bytes.get(copy);
        body.write(copy, 0, copy.length);
    }

    @Override
    public void pause() {
        attempt.request();
    }

    @Override
    public void end() {
        Map<String, Object> object;
        try {
            object = codec.read(body.toByteArray());
        } catch (Exception notJson) {
            throw new MalformedResponseException("the answer is not a JSON object: " + notJson.getMessage(), notJson);
        }
        value = view.apply(JsonView.freezeObject(object));
    }

    @Override
    public boolean hasDelivered() {
        return false;
    }

    @Override
    public LlamarackException describe(LlamarackException failure) {
        return failure;
    }

    @Override
    public void succeed() {
        answer.complete(value);
    }

    @Override
    public void fail(LlamarackException failure) {
        answer.completeExceptionally(failure);
    }
}
