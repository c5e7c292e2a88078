package io.llamarack.client;

/** The server failed (every 5xx but 503 and 529). */
public final class ServerErrorException extends ApiException {
    private static final long serialVersionUID = 1L;

    ServerErrorException(ApiError error) {
        super(error);
    }
}
