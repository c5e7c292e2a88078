package io.llamarack.client;

import java.time.Duration;
import java.util.Map;
import java.util.Optional;

/** The server answered with an error status. Subclasses name the statuses callers act upon. */
public class ApiException extends LlamarackException {
    private static final long serialVersionUID = 1L;

    /** What the server said. */
    private final ApiError error;

    ApiException(ApiError error) {
        super(error.toString(), null);
        this.error = error;
    }

    /**
     * The HTTP status.
     *
     * @return 400 to 599
     */
    public int status() {
        return error.status();
    }

    /**
     * The server's stable word for this error, such as {@code context_length_exceeded}.
     *
     * @return the code, empty when the server gave none
     */
    public Optional<String> code() {
        return error.code();
    }

    /**
     * The server's class of error, such as {@code invalid_request_error}.
     *
     * @return the type, empty when the server gave none
     */
    public Optional<String> type() {
        return error.type();
    }

    /**
     * The request field at fault.
     *
     * @return the field's name, empty when the server named none
     */
    public Optional<String> param() {
        return error.param();
    }

    /**
     * The id under which the server logged the request.
     *
     * @return the {@code x-request-id} header, empty when the server sent none
     */
    public Optional<String> requestId() {
        return error.requestId();
    }

    /**
     * How long the server asks to wait before another attempt.
     *
     * @return the wait, empty when the server gave none
     */
    public Optional<Duration> retryAfter() {
        return error.retryAfter();
    }

    /**
     * The whole answer, for fields without an accessor.
     *
     * @return the JSON object that came; empty after serialization
     */
    public Map<String, Object> body() {
        return error.body();
    }
}
