package io.llamarack.client;

import io.llamarack.client.CallTimeoutException.Phase;
import java.io.ByteArrayOutputStream;
import java.net.http.HttpHeaders;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * One HTTP exchange. Ends exactly once: by its body's end, a failure, a limit, or {@link #abort()}.
 *
 * <p>The body is taken by demand. Aborting cancels the body's subscription, which closes the connection on
 * every JDK, and the exchange itself, which closes it before the headers from JDK 16 on (JDK-8245462). No
 * {@code HttpRequest.timeout} is set: from JDK 26 on it covers the body too (JDK-8208693).
 */
final class Attempt implements HttpResponse.BodySubscriber<Void> {
    /** An error answer is a small JSON object; a page of a confused proxy is cut here. */
    private static final int MAX_ERROR_BODY_BYTES = 1024 * 1024;

    /** The end of the body follows {@code [DONE]} at once; a server that holds it back loses its connection. */
    private static final Duration DRAIN_LIMIT = Duration.ofSeconds(1);

    private final Call call;
    private final Transport transport;
    private final CallOptions options;
    private final Receiver receiver;
    private final SilenceWatch watch;
    private final AtomicBoolean over = new AtomicBoolean();
    private final CompletableFuture<Void> body = new CompletableFuture<>();
    private final ByteArrayOutputStream errorBody = new ByteArrayOutputStream();

    private volatile CompletableFuture<HttpResponse<Void>> exchange;
    private volatile Flow.Subscription subscription;
    private volatile boolean anyByte;
    private volatile boolean draining;
    private int status;
    private HttpHeaders headers;

    Attempt(Call call, Transport transport, CallOptions options, Receiver receiver) {
        this.call = call;
        this.transport = transport;
        this.options = options;
        this.receiver = receiver;
        this.watch = new SilenceWatch(transport.scheduler(), transport.executor(), this::timedOut);
    }

    void start(HttpRequest request) {
        watch.await(Phase.FIRST_BYTE, options.firstByteTimeout());
        try {
            exchange = transport.http().sendAsync(request, this::answered);
        } catch (RuntimeException rejected) {
            fail(Errors.ofTransport(rejected, transport.connectTimeout()));
            return;
        }
        exchange.whenComplete((response, failure) -> {
            if (failure != null) {
                fail(Errors.ofTransport(failure, transport.connectTimeout()));
            }
        });
        if (over.get()) {
            exchange.cancel(true);
        }
    }

    /** Asks for the next bytes. */
    void request() {
        if (over.get()) {
            return;
        }
        if (anyByte) {
            watch.await(Phase.IDLE, options.idleTimeout());
        }
        subscription.request(1);
    }

    /** The answer is complete before its body is: the rest is read and dropped, so that the connection can be kept. */
    void complete() {
        draining = true;
        watch.await(Phase.IDLE, DRAIN_LIMIT);
        call.succeeded();
        subscription.request(Long.MAX_VALUE);
    }

    void abort() {
        if (!draining && over.compareAndSet(false, true)) {
            disconnect();
        }
    }

    private HttpResponse.BodySubscriber<Void> answered(HttpResponse.ResponseInfo info) {
        status = info.statusCode();
        headers = info.headers();
        call.answered(headers);
        return this;
    }

    @Override
    public void onSubscribe(Flow.Subscription newSubscription) {
        subscription = newSubscription;
        if (over.get()) {
            newSubscription.cancel();
        } else if (isError()) {
            newSubscription.request(Long.MAX_VALUE);
        } else {
            guarded(() -> receiver.begin(headers, this));
        }
    }

    @Override
    public void onNext(List<ByteBuffer> buffers) {
        if (over.get() || draining) {
            return;
        }
        anyByte = true;
        if (isError()) {
            watch.await(Phase.IDLE, options.idleTimeout());
            buffers.forEach(this::keepErrorBody);
            return;
        }
        watch.rest();
        guarded(() -> {
            for (ByteBuffer buffer : buffers) {
                receiver.bytes(buffer);
            }
            receiver.pause();
        });
    }

    @Override
    public void onError(Throwable failure) {
        body.completeExceptionally(failure);
        fail(Errors.ofTransport(failure, transport.connectTimeout()));
    }

    @Override
    public void onComplete() {
        body.complete(null);
        guarded(() -> {
            if (!isError()) {
                receiver.end();
            }
            if (over.compareAndSet(false, true)) {
                watch.stop();
                if (isError()) {
                    call.refused(status, headers, errorBody.toByteArray());
                } else if (!draining) {
                    call.succeeded();
                }
            }
        });
    }

    /** Pending until the body ends, so that cancelling the exchange works all that time. */
    @Override
    public CompletionStage<Void> getBody() {
        return body;
    }

    private boolean isError() {
        return status / 100 != 2;
    }

    private void keepErrorBody(ByteBuffer buffer) {
        byte[] bytes = new byte[Math.min(buffer.remaining(), MAX_ERROR_BODY_BYTES - errorBody.size())];
        buffer.get(bytes);
        errorBody.write(bytes, 0, bytes.length);
    }

    private void guarded(Runnable step) {
        try {
            step.run();
        } catch (LlamarackException failure) {
            fail(failure);
        } catch (RuntimeException unexpected) {
            fail(new LlamarackException("the answer could not be processed: " + unexpected, unexpected));
        }
    }

    private void timedOut(Phase phase, Duration limit) {
        fail(new CallTimeoutException(phase, limit, "", null));
    }

    private void fail(LlamarackException failure) {
        if (over.compareAndSet(false, true)) {
            disconnect();
            if (!draining) {
                call.attemptFailed(failure);
            }
        }
    }

    private void disconnect() {
        watch.stop();
        Flow.Subscription current = subscription;
        if (current != null) {
            current.cancel();
        }
        CompletableFuture<HttpResponse<Void>> pending = exchange;
        if (pending != null) {
            pending.cancel(true);
        }
    }
}
