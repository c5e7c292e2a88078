package io.llamarack.client;

import java.net.URI;
import java.net.http.HttpRequest;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.function.BiFunction;
import java.util.function.Function;
import java.util.function.Supplier;

/**
 * A client of a llamarack gateway, or of any server that speaks the OpenAI API. Thread-safe; make one per
 * server and keep it. Blocking methods park the calling thread without pinning it, so virtual threads suit.
 *
 * <pre>{@code
 * try (LlamarackClient client = LlamarackClient.builder().baseUrl("http://127.0.0.1:8080").build()) {
 *     System.out.println(client.chat(ChatRequest.of("llama2-13b-chat", "Hello")).text());
 * }
 * }</pre>
 *
 * <p>Limits: 10 s to connect, 300 s to the first byte of an answer, 60 s of silence inside one; no limit on
 * the whole unless a deadline is set. A call is tried up to twice more when no connection was had, when it
 * broke before anything of the answer came, at status 408, 429, 502, 503, 504, or when a stream was accepted
 * but its first event says that there is no room; the server's
 * {@code Retry-After} (up to 120 s) and {@code x-should-retry} are obeyed. Once a chunk was received nothing
 * is tried again.
 */
public final class LlamarackClient implements AutoCloseable {
    private static final String CHAT = "/chat/completions";
    private static final String COMPLETIONS = "/completions";
    private static final String EMBEDDINGS = "/embeddings";

    private final Transport transport;
    private final Requests requests;
    private final CallOptions defaults;

    LlamarackClient(Transport transport, Requests requests, CallOptions defaults) {
        this.transport = transport;
        this.requests = requests;
        this.defaults = defaults;
    }

    /**
     * Starts with the default settings.
     *
     * @return a builder
     */
    public static LlamarackClientBuilder builder() {
        return new LlamarackClientBuilder();
    }

    /**
     * Starts from the environment: {@code LLAMARACK_URL} and, when there is one, {@code LLAMARACK_API_KEY}.
     *
     * @return a builder
     */
    public static LlamarackClientBuilder fromEnv() {
        return builder().baseUrl(System.getenv("LLAMARACK_URL")).apiKey(System.getenv("LLAMARACK_API_KEY"));
    }

    /**
     * Continues a dialogue. Waits for the answer.
     *
     * @param request what to ask
     * @return the answer
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public ChatResponse chat(ChatRequest request) {
        return chat(request, CallOptions.none());
    }

    /**
     * Continues a dialogue. Waits for the answer.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the answer
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public ChatResponse chat(ChatRequest request, CallOptions options) {
        return await(chatAsync(request, options));
    }

    /**
     * Continues a dialogue. Does not wait; cancelling the future closes the connection.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the answer to come, or a {@link LlamarackException}
     */
    public CompletableFuture<ChatResponse> chatAsync(ChatRequest request, CallOptions options) {
        return unary("chat", CHAT, request, options, ChatResponse::new);
    }

    /**
     * Continues a dialogue, chunk by chunk. Waits until the server has accepted the request.
     *
     * @param request what to ask
     * @return the chunks; close it
     * @throws LlamarackException when the request is refused; the subclass says why
     */
    public ChatStream streamChat(ChatRequest request) {
        return streamChat(request, CallOptions.none());
    }

    /**
     * Continues a dialogue, chunk by chunk. Waits until the server has accepted the request.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the chunks; close it
     * @throws LlamarackException when the request is refused; the subclass says why
     */
    public ChatStream streamChat(ChatRequest request, CallOptions options) {
        return await(streamChatAsync(request, options));
    }

    /**
     * Continues a dialogue, chunk by chunk. Does not wait; cancelling the pending future closes the connection.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the chunks, once the server has accepted the request; close it
     */
    public CompletableFuture<ChatStream> streamChatAsync(ChatRequest request, CallOptions options) {
        return stream("chat", CHAT, request, options,
                ChatChunk::new, new ChatAccumulator(), ChatStream::new);
    }

    /**
     * Continues a text. Waits for the answer.
     *
     * @param request what to ask
     * @return the answer
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public CompletionResponse complete(CompletionRequest request) {
        return complete(request, CallOptions.none());
    }

    /**
     * Continues a text. Waits for the answer.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the answer
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public CompletionResponse complete(CompletionRequest request, CallOptions options) {
        return await(completeAsync(request, options));
    }

    /**
     * Continues a text. Does not wait; cancelling the future closes the connection.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the answer to come, or a {@link LlamarackException}
     */
    public CompletableFuture<CompletionResponse> completeAsync(CompletionRequest request, CallOptions options) {
        return unary("completion", COMPLETIONS, request, options, CompletionResponse::new);
    }

    /**
     * Continues a text, chunk by chunk. Waits until the server has accepted the request.
     *
     * @param request what to ask
     * @return the chunks; close it
     * @throws LlamarackException when the request is refused; the subclass says why
     */
    public CompletionStream streamComplete(CompletionRequest request) {
        return streamComplete(request, CallOptions.none());
    }

    /**
     * Continues a text, chunk by chunk. Waits until the server has accepted the request.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the chunks; close it
     * @throws LlamarackException when the request is refused; the subclass says why
     */
    public CompletionStream streamComplete(CompletionRequest request, CallOptions options) {
        return await(streamCompleteAsync(request, options));
    }

    /**
     * Continues a text, chunk by chunk. Does not wait; cancelling the pending future closes the connection.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the chunks, once the server has accepted the request; close it
     */
    public CompletableFuture<CompletionStream> streamCompleteAsync(CompletionRequest request, CallOptions options) {
        return stream("completion", COMPLETIONS, request, options,
                CompletionChunk::new, new CompletionAccumulator(), CompletionStream::new);
    }

    /**
     * Turns texts into vectors. Waits for the answer.
     *
     * @param request what to ask
     * @return the answer
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public EmbeddingResponse embed(EmbeddingRequest request) {
        return embed(request, CallOptions.none());
    }

    /**
     * Turns texts into vectors. Waits for the answer.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the answer
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public EmbeddingResponse embed(EmbeddingRequest request, CallOptions options) {
        return await(embedAsync(request, options));
    }

    /**
     * Turns texts into vectors. Does not wait; cancelling the future closes the connection.
     *
     * @param request what to ask
     * @param options limits and headers of this call
     * @return the answer to come, or a {@link LlamarackException}
     */
    public CompletableFuture<EmbeddingResponse> embedAsync(EmbeddingRequest request, CallOptions options) {
        return unary("embedding", EMBEDDINGS, request, options, EmbeddingResponse::new);
    }

    /**
     * The models served. Waits for the answer.
     *
     * @return the models
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public List<ModelInfo> models() {
        return await(modelsAsync(CallOptions.none()));
    }

    /**
     * The models served. Does not wait; cancelling the future closes the connection.
     *
     * @param options limits and headers of this call
     * @return the models to come
     */
    public CompletableFuture<List<ModelInfo>> modelsAsync(CallOptions options) {
        return get("models", requests.endpoint().api("/models"), options,
                raw -> new ModelList(raw).models());
    }

    /**
     * The tokens of a text, as the model counts them. Waits for the answer.
     *
     * @param model the model's id
     * @param text the text
     * @return its tokens
     * @throws LlamarackException when there is no good answer; the subclass says why
     */
    public TokenizeResponse tokenize(String model, String text) {
        return await(tokenizeAsync(model, text, CallOptions.none()));
    }

    /**
     * The tokens of a text. Does not wait; cancelling the future closes the connection.
     *
     * @param model the model's id
     * @param text the text
     * @param options limits and headers of this call
     * @return its tokens to come
     */
    public CompletableFuture<TokenizeResponse> tokenizeAsync(String model, String text, CallOptions options) {
        return post("tokenize", requests.endpoint().server("/tokenize"), model,
                Map.of("model", model, "prompt", text), options, TokenizeResponse::new);
    }

    /**
     * Whether the server takes requests. Waits for the answer, tries once.
     *
     * @return ready or not; a server that is still loading is an answer, not an exception
     * @throws LlamarackException when the server cannot be reached or answers nonsense
     */
    public Health health() {
        return await(healthAsync(CallOptions.none()));
    }

    /**
     * Whether the server takes requests. Does not wait, tries once unless the options say otherwise;
     * cancelling the future closes the connection.
     *
     * @param options limits and headers of this call
     * @return ready or not
     */
    public CompletableFuture<Health> healthAsync(CallOptions options) {
        CallOptions once = options.over(CallOptions.none().withMaxRetries(0));
        CompletableFuture<Health> answer =
                get("health", requests.endpoint().server("/health"), once, raw -> new Health(200, raw));
        CompletableFuture<Health> health = answer.exceptionally(LlamarackClient::notReady);
        health.whenComplete((value, failure) -> answer.cancel(true)); // without effect on an answer that came
        return health;
    }

    /** Ends every call still running with {@link CallCancelledException}, then the client's own threads. */
    @Override
    public void close() {
        transport.close();
    }

    private <T> CompletableFuture<T> unary(String operation, String path, JsonView request,
            CallOptions options, Function<Map<String, Object>, T> view) {
        return post(operation, requests.endpoint().api(path), request.requiredString("model"), request.raw(),
                options, view);
    }

    private <T> CompletableFuture<T> post(String operation, URI uri, String model, Map<String, Object> fields,
            CallOptions options, Function<Map<String, Object>, T> view) {
        CallInfo info = info(operation, model);
        CallOptions merged = options.over(defaults);
        return send(info, merged, requests.post(uri, fields, false, info, merged), view);
    }

    private <T> CompletableFuture<T> get(String operation, URI uri, CallOptions options,
            Function<Map<String, Object>, T> view) {
        CallInfo info = info(operation, null);
        CallOptions merged = options.over(defaults);
        return send(info, merged, requests.get(uri, info, merged), view);
    }

    private <T> CompletableFuture<T> send(CallInfo info, CallOptions options,
            Supplier<HttpRequest.Builder> request, Function<Map<String, Object>, T> view) {
        UnaryReceiver<T> receiver = new UnaryReceiver<>(transport.codec(), view);
        Call call = new Call(transport, info, options, request, receiver);
        return started(call, receiver.answer());
    }

    private <T, R, S> CompletableFuture<S> stream(String operation, String path, JsonView request,
            CallOptions options, Function<Map<String, Object>, T> view, Accumulator<T, R> accumulator,
            BiFunction<Call, StreamReceiver<T, R>, S> stream) {
        CallInfo info = info(operation, request.requiredString("model"));
        CallOptions merged = options.over(defaults);
        StreamReceiver<T, R> receiver = new StreamReceiver<>(transport.codec(), view, accumulator);
        Call call = new Call(transport, info, merged,
                requests.post(requests.endpoint().api(path), request.raw(), true, info, merged), receiver);
        receiver.onFirstChunk(call::firstChunk);
        CompletableFuture<S> accepted = receiver.opened().thenApply(nothing -> stream.apply(call, receiver));
        return started(call, accepted);
    }

    private CallInfo info(String operation, String model) {
        return new CallInfo(operation, model, UUID.randomUUID().toString());
    }

    /** A future that fails for any reason of the caller's (cancel, orTimeout) takes its call with it. */
    private static <T> CompletableFuture<T> started(Call call, CompletableFuture<T> future) {
        future.whenComplete((value, failure) -> {
            if (failure != null) {
                call.cancel("the future was cancelled", failure);
            }
        });
        call.start();
        return future;
    }

    private static Health notReady(Throwable failure) {
        if (failure instanceof OverloadedException) {
            OverloadedException answer = (OverloadedException) failure;
            return new Health(answer.status(), answer.body());
        }
        throw new CompletionException(failure);
    }

    private static <T> T await(CompletableFuture<T> future) {
        try {
            return future.get();
        } catch (InterruptedException interrupted) {
            future.cancel(true);
            Thread.currentThread().interrupt();
            throw new CallCancelledException("the waiting thread was interrupted", interrupted);
        } catch (ExecutionException failed) {
            LlamarackException cause = Errors.ofTransport(failed.getCause(), null);
            cause.fillInStackTrace(); // the caller's line is worth more than a network thread's
            throw cause;
        }
    }

    private static final class ModelList extends JsonView {
        ModelList(Map<String, Object> raw) {
            super(raw);
        }

        List<ModelInfo> models() {
            return objects("data", ModelInfo::new);
        }
    }
}
