package io.llamarack.client;

/** This key is over its share (429); {@link #retryAfter()} says when to come back. */
public final class RateLimitedException extends ApiException {
    private static final long serialVersionUID = 1L;

    RateLimitedException(ApiError error) {
        super(error);
    }
}
