package io.llamarack.client;

/**
 * The stream ended, or its connection broke, before the answer was complete: no finish reason and no
 * {@code [DONE]} had come. What did come is in {@link #partialText()}.
 */
public final class StreamTruncatedException extends TransportException {
    private static final long serialVersionUID = 1L;

    /** The text of choice 0 received so far. */
    private final String partialText;

    StreamTruncatedException(String message, String partialText, Throwable cause) {
        super(message, cause);
        this.partialText = partialText;
    }

    /**
     * The text of choice 0 received before the break.
     *
     * @return the text, possibly empty
     */
    public String partialText() {
        return partialText;
    }
}
