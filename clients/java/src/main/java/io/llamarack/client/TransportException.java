package io.llamarack.client;

/** No connection could be made, or it broke before the answer began. */
public class TransportException extends LlamarackException {
    private static final long serialVersionUID = 1L;

    TransportException(String message, Throwable cause) {
        super(message, cause);
    }
}
