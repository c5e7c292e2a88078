package io.llamarack.client;

import java.net.http.HttpClient;
import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.function.Supplier;

/** Settings of a {@link LlamarackClient}. */
public final class LlamarackClientBuilder {
    /** Connecting inside one data centre takes milliseconds; 10 s is a lost host. */
    private static final Duration CONNECT_TIMEOUT = Duration.ofSeconds(10);

    /** A queue and a long prompt on a loaded server take minutes; the usual read limit of this stack is 300 s. */
    private static final Duration FIRST_BYTE_TIMEOUT = Duration.ofSeconds(300);

    /** The gateway sends a heartbeat every 8 s by default, so 60 s miss seven. */
    private static final Duration IDLE_TIMEOUT = Duration.ofSeconds(60);

    private static final int MAX_RETRIES = 2;

    private String baseUrl;
    private Supplier<String> apiKey = () -> null;
    private Duration connectTimeout = CONNECT_TIMEOUT;
    private CallOptions defaults = CallOptions.none()
            .withFirstByteTimeout(FIRST_BYTE_TIMEOUT)
            .withIdleTimeout(IDLE_TIMEOUT)
            .withMaxRetries(MAX_RETRIES);
    private boolean http2;
    private HttpClient httpClient;
    private Executor executor;
    private JsonCodec codec;
    private CallListener listener = new CallListener() {};

    LlamarackClientBuilder() {}

    /**
     * Where the server is. A missing {@code /v1} at the end is added.
     *
     * @param value such as {@code http://127.0.0.1:8080}
     * @return this
     */
    public LlamarackClientBuilder baseUrl(String value) {
        baseUrl = value;
        return this;
    }

    /**
     * The key to send as {@code Authorization: Bearer}.
     *
     * @param value the key, or null for none
     * @return this
     */
    public LlamarackClientBuilder apiKey(String value) {
        return apiKey(() -> value);
    }

    /**
     * Where to take the key from, asked for each attempt.
     *
     * @param value gives the key, or null for none
     * @return this
     */
    public LlamarackClientBuilder apiKey(Supplier<String> value) {
        apiKey = Objects.requireNonNull(value);
        return this;
    }

    /**
     * The longest time to connect. Not used with {@link #httpClient(HttpClient)}, which has its own.
     *
     * @param value over 0; 10 s by default
     * @return this
     */
    public LlamarackClientBuilder connectTimeout(Duration value) {
        connectTimeout = CallOptions.positive("connectTimeout", value);
        return this;
    }

    /**
     * The longest wait from a request's start to the first byte of the answer's body.
     *
     * @param value over 0; 300 s by default
     * @return this
     */
    public LlamarackClientBuilder firstByteTimeout(Duration value) {
        defaults = defaults.withFirstByteTimeout(value);
        return this;
    }

    /**
     * The longest silence inside an answer; the server's heartbeats end a silence.
     *
     * @param value over 0; 60 s by default
     * @return this
     */
    public LlamarackClientBuilder idleTimeout(Duration value) {
        defaults = defaults.withIdleTimeout(value);
        return this;
    }

    /**
     * The longest time for a whole call, with all attempts and the reading of a stream.
     *
     * @param value over 0; none by default
     * @return this
     */
    public LlamarackClientBuilder deadline(Duration value) {
        defaults = defaults.withDeadline(value);
        return this;
    }

    /**
     * How often to try again when nothing of an answer has come.
     *
     * @param value 0 for a single attempt; 2 by default
     * @return this
     */
    public LlamarackClientBuilder maxRetries(int value) {
        defaults = defaults.withMaxRetries(value);
        return this;
    }

    /**
     * Sends a header with every request.
     *
     * @param name the header
     * @param value its value
     * @return this
     */
    public LlamarackClientBuilder header(String name, String value) {
        defaults = defaults.withHeader(name, value);
        return this;
    }

    /**
     * Allows HTTP/2 on {@code https} URLs. Plain {@code http} is always HTTP/1.1: the JDK's offer to upgrade
     * (h2c) makes some servers lose the request's body.
     *
     * @param value false by default
     * @return this
     */
    public LlamarackClientBuilder http2(boolean value) {
        http2 = value;
        return this;
    }

    /**
     * Uses a client with proxy, TLS or other settings of the caller's.
     *
     * @param value the client; stays the caller's
     * @return this
     */
    public LlamarackClientBuilder httpClient(HttpClient value) {
        httpClient = value;
        return this;
    }

    /**
     * Runs the client's work, such as parsing and signals to subscribers, on threads of the caller's.
     *
     * @param value the executor; stays the caller's. By default the client's own daemon threads
     * @return this
     */
    public LlamarackClientBuilder executor(Executor value) {
        executor = value;
        return this;
    }

    /**
     * Uses another JSON library.
     *
     * @param value the codec; Jackson 2 by default
     * @return this
     */
    public LlamarackClientBuilder jsonCodec(JsonCodec value) {
        codec = value;
        return this;
    }

    /**
     * Tells what happens to each call.
     *
     * @param value the listener
     * @return this
     */
    public LlamarackClientBuilder listener(CallListener value) {
        listener = Objects.requireNonNull(value);
        return this;
    }

    /**
     * Makes the client.
     *
     * @return a client, to be closed when the application ends
     * @throws IllegalArgumentException when the base URL is missing or not an http(s) URL
     */
    public LlamarackClient build() {
        Endpoint endpoint = Endpoint.of(baseUrl);
        ExecutorService own = executor == null
                ? Executors.newCachedThreadPool(task -> Transport.daemon(task, "llamarack-client")) : null;
        Executor used = own == null ? executor : own;
        HttpClient http = httpClient != null ? httpClient
                : HttpClient.newBuilder().connectTimeout(connectTimeout).executor(used).build();
        Duration connectLimit = http.connectTimeout().orElse(connectTimeout);
        Transport transport = new Transport(
                http, connectLimit, used, own, codec == null ? new JacksonCodec() : codec, listener);
        return new LlamarackClient(transport, new Requests(endpoint, apiKey, http2, transport.codec()), defaults);
    }
}
