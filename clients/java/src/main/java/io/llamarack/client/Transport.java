package io.llamarack.client;

import java.lang.System.Logger;
import java.net.http.HttpClient;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.function.Consumer;

/** What all calls of one client share: the HTTP client, threads, codec, listener. */
final class Transport {
    private static final Logger LOG = System.getLogger("io.llamarack.client");

    private final HttpClient http;
    private final Duration connectTimeout;
    private final Executor executor;
    private final ExecutorService ownExecutor;
    private final ScheduledThreadPoolExecutor scheduler;
    private final JsonCodec codec;
    private final CallListener listener;
    private final Set<Call> running = ConcurrentHashMap.newKeySet();
    private volatile boolean closed;

    /** {@code ownExecutor} is shut down with the client; null when the executor is the caller's. */
    Transport(HttpClient http, Duration connectTimeout, Executor executor, ExecutorService ownExecutor,
            JsonCodec codec, CallListener listener) {
        this.http = http;
        this.connectTimeout = connectTimeout;
        this.executor = executor;
        this.ownExecutor = ownExecutor;
        this.codec = codec;
        this.listener = listener;
        this.scheduler = new ScheduledThreadPoolExecutor(1, task -> daemon(task, "llamarack-timer"));
        scheduler.setRemoveOnCancelPolicy(true);
    }

    static Thread daemon(Runnable task, String name) {
        Thread thread = new Thread(task, name);
        thread.setDaemon(true);
        return thread;
    }

    HttpClient http() {
        return http;
    }

    Duration connectTimeout() {
        return connectTimeout;
    }

    Executor executor() {
        return executor;
    }

    ScheduledThreadPoolExecutor scheduler() {
        return scheduler;
    }

    JsonCodec codec() {
        return codec;
    }

    void register(Call call) {
        running.add(call);
        if (closed) {
            call.cancel("the client is closed", null);
        }
    }

    void unregister(Call call) {
        running.remove(call);
    }

    void notifyListener(Consumer<CallListener> event) {
        try {
            event.accept(listener);
        } catch (RuntimeException failure) {
            LOG.log(Logger.Level.WARNING, "a call listener failed", failure);
        }
    }

    /** Ends all running calls, then the threads. JDK 11 to 20 cannot close an HTTP client; the collector takes it. */
    void close() {
        closed = true;
        running.forEach(call -> call.cancel("the client was closed", null));
        scheduler.shutdownNow();
        if (ownExecutor != null) {
            ownExecutor.shutdown();
        }
    }
}
