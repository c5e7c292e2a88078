package io.llamarack.client;

import java.time.Duration;

/**
 * Hears what happens to calls, for logs and metrics. Methods run on the client's own threads and must
 * return quickly; what they throw is logged and dropped.
 */
public interface CallListener {
    /**
     * A call begins.
     *
     * @param call the call
     */
    default void onStart(CallInfo call) {}

    /**
     * An attempt failed and another follows.
     *
     * @param call the call
     * @param failure why the attempt failed
     * @param wait the pause before the next attempt
     */
    default void onRetry(CallInfo call, LlamarackException failure, Duration wait) {}

    /**
     * The first event of a stream came.
     *
     * @param call the call
     * @param sinceStart time since the call began
     */
    default void onFirstChunk(CallInfo call, Duration sinceStart) {}

    /**
     * The call is over.
     *
     * @param call the call
     * @param sinceStart time since the call began
     * @param failure why it failed, or null
     */
    default void onEnd(CallInfo call, Duration sinceStart, LlamarackException failure) {}
}
