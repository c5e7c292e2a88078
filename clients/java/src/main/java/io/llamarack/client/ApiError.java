package io.llamarack.client;

import java.io.Serializable;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;

/** What an error answer said: status, envelope and the headers that matter. */
final class ApiError implements Serializable {
    private static final long serialVersionUID = 1L;

    private final int status;
    private final String message;
    private final String type;
    private final String code;
    private final String param;
    private final String requestId;
    private final Duration retryAfter;
    private final transient Map<String, Object> body;

    ApiError(int status, String message, String type, String code, String param, String requestId,
            Duration retryAfter, Map<String, Object> body) {
        this.status = status;
        this.message = message;
        this.type = type;
        this.code = code;
        this.param = param;
        this.requestId = requestId;
        this.retryAfter = retryAfter;
        this.body = body;
    }

    int status() {
        return status;
    }

    String message() {
        return message;
    }

    Optional<String> type() {
        return Optional.ofNullable(type);
    }

    Optional<String> code() {
        return Optional.ofNullable(code);
    }

    Optional<String> param() {
        return Optional.ofNullable(param);
    }

    Optional<String> requestId() {
        return Optional.ofNullable(requestId);
    }

    Optional<Duration> retryAfter() {
        return Optional.ofNullable(retryAfter);
    }

    Map<String, Object> body() {
        return body == null ? Map.of() : body;
    }

    @Override
    public String toString() {
        StringBuilder text = new StringBuilder().append(status).append(": ").append(message);
        if (code != null) {
            text.append(" (code ").append(code).append(')');
        }
        if (requestId != null) {
            text.append(" [request ").append(requestId).append(']');
        }
        return text.toString();
    }
}
