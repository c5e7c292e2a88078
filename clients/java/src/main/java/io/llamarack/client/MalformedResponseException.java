package io.llamarack.client;

/** The answer is not the JSON that the endpoint promises. */
public final class MalformedResponseException extends LlamarackException {
    private static final long serialVersionUID = 1L;

    MalformedResponseException(String message, Throwable cause) {
        super(message, cause);
    }
}
