package io.llamarack.client;

import java.time.Duration;

/** A time limit passed; {@link #phase()} says which one. */
public final class CallTimeoutException extends LlamarackException {
    private static final long serialVersionUID = 1L;

    /** The four limits of a call. */
    public enum Phase {
        /** Connecting, TLS included. */
        CONNECT,
        /** From the request's start to the first byte of the answer's body, heartbeats included. */
        FIRST_BYTE,
        /** Between two bytes of the body. */
        IDLE,
        /** The whole call with all its attempts. */
        DEADLINE
    }

    /** Which limit passed. */
    private final Phase phase;
    /** The limit that passed. */
    private final Duration limit;
    /** The text of choice 0 received so far. */
    private final String partialText;

    CallTimeoutException(Phase phase, Duration limit, String partialText, Throwable cause) {
        super(phase + " limit of " + limit.toMillis() / 1000.0 + " s passed", cause);
        this.phase = phase;
        this.limit = limit;
        this.partialText = partialText;
    }

    /**
     * Which limit passed.
     *
     * @return the phase
     */
    public Phase phase() {
        return phase;
    }

    /**
     * The limit that passed.
     *
     * @return its length
     */
    public Duration limit() {
        return limit;
    }

    /**
     * The text of choice 0 received before the limit passed.
     *
     * @return the text; empty for a call without a stream
     */
    public String partialText() {
        return partialText;
    }
}
