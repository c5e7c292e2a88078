package io.llamarack.client;

/** Prompt plus requested output exceed the context of the model; shorten the dialogue. */
public final class ContextLengthException extends BadRequestException {
    private static final long serialVersionUID = 1L;

    ContextLengthException(ApiError error) {
        super(error);
    }
}
