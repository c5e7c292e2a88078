package io.llamarack.client;

/** The server has no capacity now, or its model is still loading (503, 529). */
public final class OverloadedException extends ApiException {
    private static final long serialVersionUID = 1L;

    OverloadedException(ApiError error) {
        super(error);
    }
}
