package io.llamarack.client;

/** The key is missing or wrong (401). */
public final class AuthenticationException extends ApiException {
    private static final long serialVersionUID = 1L;

    AuthenticationException(ApiError error) {
        super(error);
    }
}
