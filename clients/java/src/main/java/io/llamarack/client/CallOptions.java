package io.llamarack.client;

import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Objects;

/**
 * Limits and headers of one call. Immutable: each {@code with} method returns a changed copy. What is not
 * set is taken from the client.
 */
public final class CallOptions {
    private static final CallOptions NONE = new CallOptions(null, null, null, null, Map.of());

    private final Duration firstByteTimeout;
    private final Duration idleTimeout;
    private final Duration deadline;
    private final Integer maxRetries;
    private final Map<String, String> headers;

    private CallOptions(Duration firstByteTimeout, Duration idleTimeout, Duration deadline, Integer maxRetries,
            Map<String, String> headers) {
        this.firstByteTimeout = firstByteTimeout;
        this.idleTimeout = idleTimeout;
        this.deadline = deadline;
        this.maxRetries = maxRetries;
        this.headers = headers;
    }

    /**
     * Options that change nothing.
     *
     * @return the empty options
     */
    public static CallOptions none() {
        return NONE;
    }

    /**
     * The longest wait from the request's start to the first byte of the answer's body.
     *
     * @param value over 0
     * @return a changed copy
     */
    public CallOptions withFirstByteTimeout(Duration value) {
        return new CallOptions(positive("firstByteTimeout", value), idleTimeout, deadline, maxRetries, headers);
    }

    /**
     * The longest silence inside an answer; the server's heartbeats end a silence.
     *
     * @param value over 0
     * @return a changed copy
     */
    public CallOptions withIdleTimeout(Duration value) {
        return new CallOptions(firstByteTimeout, positive("idleTimeout", value), deadline, maxRetries, headers);
    }

    /**
     * The longest time for the whole call, with all attempts and the reading of a stream. The server is
     * told, and drops work that cannot be done in time.
     *
     * @param value over 0
     * @return a changed copy
     */
    public CallOptions withDeadline(Duration value) {
        return new CallOptions(firstByteTimeout, idleTimeout, positive("deadline", value), maxRetries, headers);
    }

    /**
     * How often to try again.
     *
     * @param value 0 for a single attempt
     * @return a changed copy
     */
    public CallOptions withMaxRetries(int value) {
        return new CallOptions(firstByteTimeout, idleTimeout, deadline, notNegative("maxRetries", value), headers);
    }

    /**
     * Sends a header, in place of the client's of the same name.
     *
     * @param name the header
     * @param value its value
     * @return a changed copy
     */
    public CallOptions withHeader(String name, String value) {
        Map<String, String> copy = new LinkedHashMap<>(headers);
        copy.put(Objects.requireNonNull(name), Objects.requireNonNull(value));
        return new CallOptions(firstByteTimeout, idleTimeout, deadline, maxRetries, Map.copyOf(copy));
    }

    /** These options, with the other's where these are not set. */
    CallOptions over(CallOptions other) {
        Map<String, String> merged = new LinkedHashMap<>(other.headers);
        headers.forEach((name, value) -> {
            merged.keySet().removeIf(name::equalsIgnoreCase);
            merged.put(name, value);
        });
        return new CallOptions(
                firstByteTimeout == null ? other.firstByteTimeout : firstByteTimeout,
                idleTimeout == null ? other.idleTimeout : idleTimeout,
                deadline == null ? other.deadline : deadline,
                maxRetries == null ? other.maxRetries : maxRetries,
                merged);
    }

    Duration firstByteTimeout() {
        return firstByteTimeout;
    }

    Duration idleTimeout() {
        return idleTimeout;
    }

    /** Null: none. */
    Duration deadline() {
        return deadline;
    }

    int maxRetries() {
        return maxRetries;
    }

    Map<String, String> headers() {
        return headers;
    }

    static Duration positive(String name, Duration value) {
        if (value.isZero() || value.isNegative()) {
            throw new IllegalArgumentException("`" + name + "` must be over 0; given " + value);
        }
        return value;
    }

    private static int notNegative(String name, int value) {
        if (value < 0) {
            throw new IllegalArgumentException("`" + name + "` must be 0 or more; given " + value);
        }
        return value;
    }
}
