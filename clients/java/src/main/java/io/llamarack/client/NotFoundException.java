package io.llamarack.client;

/** The model or the path is unknown (404). */
public final class NotFoundException extends ApiException {
    private static final long serialVersionUID = 1L;

    NotFoundException(ApiError error) {
        super(error);
    }
}
