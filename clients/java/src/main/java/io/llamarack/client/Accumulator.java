package io.llamarack.client;

/** Puts the chunks of a stream together. Its methods may be called from different threads. */
interface Accumulator<T, R> {
    void add(T chunk);

    /** Whether every answer seen has its finish reason. */
    boolean isFinished();

    /** The text of answer 0 so far. */
    String text();

    /** The same type that the call without a stream returns. */
    R result();
}
