package io.llamarack.client;

import java.util.Optional;

/** Names one call to a {@link CallListener}. */
public final class CallInfo {
    private final String operation;
    private final String model;
    private final String idempotencyKey;
    private volatile String requestId;

    CallInfo(String operation, String model, String idempotencyKey) {
        this.operation = operation;
        this.model = model;
        this.idempotencyKey = idempotencyKey;
    }

    /**
     * What is asked for.
     *
     * @return {@code chat}, {@code completion}, {@code embedding}, {@code models}, {@code tokenize} or {@code health}
     */
    public String operation() {
        return operation;
    }

    /**
     * The model asked.
     *
     * @return its id, or null for calls without one
     */
    public String model() {
        return model;
    }

    /**
     * The random key that all attempts of the call carry.
     *
     * @return the key
     */
    public String idempotencyKey() {
        return idempotencyKey;
    }

    /**
     * The id under which the server logged the last attempt.
     *
     * @return the {@code x-request-id} header of its answer, empty before one came or when the server sends none
     */
    public Optional<String> requestId() {
        return Optional.ofNullable(requestId);
    }

    void requestId(String id) {
        requestId = id;
    }

    @Override
    public String toString() {
        return operation + " " + model + " " + idempotencyKey;
    }
}
