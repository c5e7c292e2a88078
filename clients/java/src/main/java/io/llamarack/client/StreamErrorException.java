package io.llamarack.client;

import java.util.Optional;

/** The server reported an error inside a stream that had begun well. */
public final class StreamErrorException extends LlamarackException {
    private static final long serialVersionUID = 1L;

    /** What the server said. */
    private final ApiError error;
    /** The text of choice 0 received so far. */
    private final String partialText;

    StreamErrorException(ApiError error, String partialText) {
        super(error.message() + error.code().map(code -> " (code " + code + ")").orElse(""), null);
        this.error = error;
        this.partialText = partialText;
    }

    /**
     * The server's stable word for this error.
     *
     * @return the code, empty when the server gave none
     */
    public Optional<String> code() {
        return error.code();
    }

    /**
     * The server's class of error.
     *
     * @return the type, empty when the server gave none
     */
    public Optional<String> type() {
        return error.type();
    }

    /**
     * The id under which the server logged the request.
     *
     * @return the {@code x-request-id} header, empty when the server sent none
     */
    public Optional<String> requestId() {
        return error.requestId();
    }

    /**
     * The text of choice 0 received before the error.
     *
     * @return the text, possibly empty
     */
    public String partialText() {
        return partialText;
    }
}
