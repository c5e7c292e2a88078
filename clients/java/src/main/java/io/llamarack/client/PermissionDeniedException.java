package io.llamarack.client;

/** The key is known but may not do this (403). */
public final class PermissionDeniedException extends ApiException {
    private static final long serialVersionUID = 1L;

    PermissionDeniedException(ApiError error) {
        super(error);
    }
}
