package io.llamarack.client;

import io.llamarack.client.CallTimeoutException.Phase;
import java.net.http.HttpConnectTimeoutException;
import java.net.http.HttpHeaders;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import java.util.concurrent.CompletionException;

/** Error answers and transport failures in, typed exceptions out. */
final class Errors {
    /** How much of a body that is not JSON (a proxy's page) goes into the message. */
    private static final int MAX_MESSAGE_CHARS = 300;

    private Errors() {}

    static ApiException ofResponse(int status, HttpHeaders headers, byte[] body, JsonCodec codec) {
        Map<String, Object> envelope;
        try {
            envelope = codec.read(body);
        } catch (Exception notJson) {
            String text = new String(body, StandardCharsets.UTF_8).strip();
            envelope = Map.of("error", text.substring(0, Math.min(text.length(), MAX_MESSAGE_CHARS)));
        }
        return ofError(parse(status, headers, envelope));
    }

    /** The envelope is `{"error": {...}}`; some servers send a plain string, or the fields at the top. */
    static ApiError parse(int status, HttpHeaders headers, Map<String, Object> envelope) {
        Object error = envelope.get("error");
        Map<String, Object> fields = error instanceof Map ? JsonView.asObject(error) : envelope;
        String message = text(error instanceof String ? error : fields.get("message"));
        return new ApiError(
                status,
                message == null || message.isEmpty() ? "no message in the error answer" : message,
                text(fields.get("type")),
                text(fields.get("code")),
                text(fields.get("param")),
                headers.firstValue("x-request-id").orElse(null),
                RetryPolicy.retryAfter(headers, Instant.now()).orElse(null),
                JsonView.freezeObject(envelope));
    }

    private static String text(Object value) {
        return value == null ? null : value.toString();
    }

    private static ApiException ofError(ApiError error) {
        // llama.cpp's server names the same condition in `type`, vLLM and OpenAI in `code`.
        boolean contextLength = error.code().filter("context_length_exceeded"::equals).isPresent()
                || error.type().filter("exceed_context_size_error"::equals).isPresent();
        switch (error.status()) {
            case 401:
                return new AuthenticationException(error);
            case 403:
                return new PermissionDeniedException(error);
            case 404:
                return new NotFoundException(error);
            case 408:
                return new ApiException(error);
            case 429:
                return new RateLimitedException(error);
            case 503:
            case 529:
                return new OverloadedException(error);
            default:
                if (error.status() >= 500) {
                    return new ServerErrorException(error);
                }
                if (error.status() < 400) {
                    return new ApiException(error);
                }
                return contextLength ? new ContextLengthException(error) : new BadRequestException(error);
        }
    }

    /** What the HTTP client threw, as one of ours. */
    static LlamarackException ofTransport(Throwable thrown, Duration connectTimeout) {
        Throwable cause = thrown instanceof CompletionException && thrown.getCause() != null
                ? thrown.getCause() : thrown;
        if (cause instanceof LlamarackException) {
            return (LlamarackException) cause;
        }
        if (cause instanceof HttpConnectTimeoutException) {
            return new CallTimeoutException(Phase.CONNECT, connectTimeout, "", cause);
        }
        String text = cause.getMessage();
        return new TransportException(
                "the connection failed: " + (text == null ? cause.getClass().getSimpleName() : text), cause);
    }
}
