package io.llamarack.client;

import io.llamarack.client.CallTimeoutException.Phase;
import java.net.http.HttpHeaders;
import java.net.http.HttpRequest;
import java.time.Duration;
import java.time.Instant;
import java.util.Optional;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** One logical call: its attempts, the waits between them, its deadline. Ends exactly once. */
final class Call {
    private final Transport transport;
    private final CallInfo info;
    private final CallOptions options;
    private final Receiver receiver;
    private final Supplier<HttpRequest.Builder> requests;
    private final long startNanos = System.nanoTime();

    // Guarded by this.
    private boolean finished;
    private int attempts;
    private Attempt attempt;
    private ScheduledFuture<?> retryTimer;
    private ScheduledFuture<?> deadlineTimer;

    /** {@code requests} builds the request anew for each attempt, since a key may have changed. */
    Call(Transport transport, CallInfo info, CallOptions options, Supplier<HttpRequest.Builder> requests,
            Receiver receiver) {
        this.transport = transport;
        this.info = info;
        this.options = options;
        this.requests = requests;
        this.receiver = receiver;
    }

    void start() {
        transport.register(this);
        transport.notifyListener(listener -> listener.onStart(info));
        if (options.deadline() != null) {
            schedule(options.deadline(), () -> finish(
                    new CallTimeoutException(Phase.DEADLINE, options.deadline(), "", null)), false);
        }
        launch();
    }

    /** Ends the call for the caller's sake; without effect when it is over. */
    void cancel(String reason, Throwable cause) {
        finish(new CallCancelledException(reason, cause));
    }

    void succeeded() {
        finish(null);
    }

    void answered(HttpHeaders headers) {
        headers.firstValue("x-request-id").ifPresent(info::requestId);
    }

    void firstChunk() {
        transport.notifyListener(listener -> listener.onFirstChunk(info, sinceStart()));
    }

    /** The server answered with an error status. */
    void refused(int status, HttpHeaders headers, byte[] body) {
        retryOrFinish(
                Errors.ofResponse(status, headers, body, transport.codec()),
                RetryPolicy.afterStatus(status, headers, failedAttempts(), Instant.now(), this::random));
    }

    void attemptFailed(LlamarackException failure) {
        boolean retryable = RetryPolicy.mayRetry(failure) && !receiver.hasDelivered();
        retryOrFinish(failure, retryable
                ? Optional.of(RetryPolicy.backoff(failedAttempts(), this::random)) : Optional.empty());
    }

    private synchronized int failedAttempts() {
        return attempts - 1;
    }

    private double random() {
        return ThreadLocalRandom.current().nextDouble();
    }

    private void retryOrFinish(LlamarackException failure, Optional<Duration> wait) {
        boolean again = wait.isPresent()
                && failedAttempts() < options.maxRetries()
                && (options.deadline() == null || sinceStart().plus(wait.get()).compareTo(options.deadline()) < 0);
        if (again) {
            transport.notifyListener(listener -> listener.onRetry(info, failure, wait.get()));
            schedule(wait.get(), this::launch, true);
        } else {
            finish(failure);
        }
    }

    private void launch() {
        Attempt next;
        int number;
        synchronized (this) {
            if (finished) {
                return;
            }
            number = attempts++;
            next = new Attempt(this, transport, options, receiver);
            attempt = next;
        }
        HttpRequest request;
        try {
            request = prepare(number);
        } catch (RuntimeException invalid) {
            finish(new LlamarackException("the request cannot be sent: " + invalid.getMessage(), invalid));
            return;
        }
        next.start(request);
    }

    private HttpRequest prepare(int number) {
        HttpRequest.Builder request = requests.get();
        // The headers of the OpenAI clients, so that a server counts and drops all clients' work alike.
        request.setHeader("X-Stainless-Retry-Count", Integer.toString(number));
        if (options.deadline() != null) {
            double leftSeconds = options.deadline().minus(sinceStart()).toMillis() / 1000.0;
            request.setHeader("X-Stainless-Timeout", Double.toString(Math.max(leftSeconds, 0.001)));
        }
        return request.build();
    }

    private void schedule(Duration wait, Runnable step, boolean isRetry) {
        synchronized (this) {
            if (finished) {
                return;
            }
            try {
                ScheduledFuture<?> timer = transport.scheduler().schedule(
                        () -> transport.executor().execute(step), wait.toNanos(), TimeUnit.NANOSECONDS);
                if (isRetry) {
                    retryTimer = timer;
                } else {
                    deadlineTimer = timer;
                }
                return;
            } catch (RejectedExecutionException clientClosed) {
                // Falls through: the client was closed while the call began.
            }
        }
        cancel("the client is closed", null);
    }

    private void finish(LlamarackException failure) {
        Attempt last;
        synchronized (this) {
            if (finished) {
                return;
            }
            finished = true;
            last = attempt;
            cancelTimer(retryTimer);
            cancelTimer(deadlineTimer);
        }
        transport.unregister(this);
        LlamarackException described = failure == null ? null : receiver.describe(failure);
        if (last != null) {
            last.abort();
        }
        transport.notifyListener(listener -> listener.onEnd(info, sinceStart(), described));
        if (described == null) {
            receiver.succeed();
        } else {
            receiver.fail(described);
        }
    }

    private static void cancelTimer(ScheduledFuture<?> timer) {
        if (timer != null) {
            timer.cancel(false);
        }
    }

    private Duration sinceStart() {
        return Duration.ofNanos(System.nanoTime() - startNanos);
    }
}
