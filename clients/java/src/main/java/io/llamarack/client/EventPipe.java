package io.llamarack.client;

import java.util.ArrayDeque;
import java.util.concurrent.Flow;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * Hands events from the network to one reader, blocking or by {@link Flow}, and asks for more only while
 * few are waiting: memory stays flat however slow the reader is. A lock rather than {@code synchronized}
 * where a reader waits, so that virtual threads are not pinned.
 */
final class EventPipe<T> {
    /** Fewer events than this are waiting: the next network read is asked for. */
    private static final int LOW_WATER_EVENTS = 32;

    private final Runnable request;
    private final ReentrantLock lock = new ReentrantLock();
    private final Condition changed = lock.newCondition();

    // Guarded by lock.
    private final ArrayDeque<T> events = new ArrayDeque<>();
    private boolean requested;
    private boolean ended;
    private LlamarackException failure;
    private Flow.Subscriber<? super T> subscriber;
    private Runnable onAbandon;
    private long demand;
    private boolean emitting;

    EventPipe(Runnable request) {
        this.request = request;
    }

    /** A new attempt begins: nothing is asked of it yet. */
    void restart() {
        answered();
    }

    /** The outstanding read was answered. */
    void answered() {
        lock.lock();
        try {
            requested = false;
        } finally {
            lock.unlock();
        }
    }

    void requestIfLow() {
        lock.lock();
        try {
            if (requested || ended || events.size() >= LOW_WATER_EVENTS) {
                return;
            }
            requested = true;
        } finally {
            lock.unlock();
        }
        request.run();
    }

    void offer(T event) {
        change(() -> events.add(event));
    }

    void end() {
        change(() -> ended = true);
    }

    /** What came before the failure is still read, unless the reader itself gave up. */
    void fail(LlamarackException cause) {
        change(() -> {
            if (!ended) {
                ended = true;
                failure = cause;
                if (cause instanceof CallCancelledException) {
                    events.clear();
                }
            }
        });
    }

    /** Waits for the next event. Null after the last one; throws the stream's failure. */
    T take() throws InterruptedException {
        T event;
        lock.lockInterruptibly();
        try {
            while (events.isEmpty() && !ended) {
                changed.await();
            }
            event = events.poll();
            if (event == null && failure != null) {
                failure.fillInStackTrace();
                throw failure;
            }
        } finally {
            lock.unlock();
        }
        requestIfLow();
        return event;
    }

    /** {@code abandon} ends the call when the subscriber wants no more. */
    void subscribe(Flow.Subscriber<? super T> newSubscriber, Runnable abandon) {
        lock.lock();
        try {
            subscriber = newSubscriber;
            onAbandon = abandon;
            emitting = true; // until onSubscribe has returned
        } finally {
            lock.unlock();
        }
        newSubscriber.onSubscribe(new Flow.Subscription() {
            @Override
            public void request(long count) {
                if (count > 0) {
                    change(() -> demand = demand + count < 0 ? Long.MAX_VALUE : demand + count);
                } else {
                    reject(new IllegalArgumentException("request(" + count + ") of a subscriber: must be over 0"));
                }
            }

            @Override
            public void cancel() {
                change(() -> subscriber = null);
                abandon.run();
            }
        });
        change(() -> emitting = false);
    }

    /** A subscriber that breaks the rules, or throws, gets its error and nothing more. */
    private void reject(RuntimeException cause) {
        change(() -> {
            ended = true;
            failure = new LlamarackException("the subscriber failed: " + cause.getMessage(), cause);
            events.clear();
        });
        onAbandon.run();
    }

    private void change(Runnable step) {
        lock.lock();
        try {
            step.run();
            changed.signalAll();
        } finally {
            lock.unlock();
        }
        emit();
    }

    /** Whoever comes first emits for all: signals to a subscriber never overlap and never nest. */
    private void emit() {
        Runnable signal = nextSignal(false);
        while (signal != null) {
            try {
                signal.run();
            } catch (RuntimeException thrown) {
                reject(thrown);
            }
            requestIfLow();
            signal = nextSignal(true);
        }
    }

    private Runnable nextSignal(boolean isEmitter) {
        lock.lock();
        try {
            if (emitting && !isEmitter) {
                return null;
            }
            emitting = true;
            Flow.Subscriber<? super T> target = subscriber;
            if (target != null && demand > 0 && !events.isEmpty()) {
                demand--;
                T event = events.poll();
                return () -> target.onNext(event);
            }
            if (target != null && ended && events.isEmpty()) {
                subscriber = null;
                LlamarackException cause = failure;
                return cause == null ? target::onComplete : () -> target.onError(cause);
            }
            emitting = false;
            return null;
        } finally {
            lock.unlock();
        }
    }
}
