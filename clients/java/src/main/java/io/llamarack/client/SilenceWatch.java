package io.llamarack.client;

import io.llamarack.client.CallTimeoutException.Phase;
import java.time.Duration;
import java.util.concurrent.Executor;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.BiConsumer;

/**
 * Notices that nothing came for too long. Silence counts only while something is asked for, so a slow
 * reader is never taken for a slow server. Resetting costs no timer: an early timer looks again later.
 */
final class SilenceWatch {
    private final ScheduledExecutorService scheduler;
    private final Executor executor;
    private final BiConsumer<Phase, Duration> passed;

    // Guarded by this.
    private ScheduledFuture<?> timer;
    private long timerNanos;
    private long dueNanos;
    private boolean waiting;
    private boolean stopped;
    private Phase phase;
    private Duration limit;

    SilenceWatch(ScheduledExecutorService scheduler, Executor executor, BiConsumer<Phase, Duration> passed) {
        this.scheduler = scheduler;
        this.executor = executor;
        this.passed = passed;
    }

    /** Silence counts from now. */
    synchronized void await(Phase newPhase, Duration newLimit) {
        phase = newPhase;
        limit = newLimit;
        waiting = true;
        dueNanos = System.nanoTime() + newLimit.toNanos();
        if (timer == null || timerNanos - dueNanos > 0) {
            schedule();
        }
    }

    /** Nothing is asked for: silence does not count. */
    synchronized void rest() {
        waiting = false;
    }

    synchronized void stop() {
        stopped = true;
        if (timer != null) {
            timer.cancel(false);
        }
    }

    private void schedule() {
        if (stopped) {
            return;
        }
        if (timer != null) {
            timer.cancel(false);
        }
        timerNanos = dueNanos;
        try {
            timer = scheduler.schedule(this::look, dueNanos - System.nanoTime(), TimeUnit.NANOSECONDS);
        } catch (RejectedExecutionException clientClosed) {
            stopped = true; // close() ends every call itself
        }
    }

    private synchronized void look() {
        timer = null;
        if (stopped || !waiting) {
            return;
        }
        if (dueNanos - System.nanoTime() > 0) {
            schedule();
            return;
        }
        stopped = true;
        Phase passedPhase = phase;
        Duration passedLimit = limit;
        executor.execute(() -> passed.accept(passedPhase, passedLimit));
    }
}
