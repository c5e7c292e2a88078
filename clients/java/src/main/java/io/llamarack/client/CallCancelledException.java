package io.llamarack.client;

/** The caller cancelled the call, closed its stream or client, or its thread was interrupted. */
public final class CallCancelledException extends LlamarackException {
    private static final long serialVersionUID = 1L;

    CallCancelledException(String message, Throwable cause) {
        super(message, cause);
    }
}
