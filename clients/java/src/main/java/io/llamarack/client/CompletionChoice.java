package io.llamarack.client;

import java.util.Map;
import java.util.Optional;

/** One continuation of a prompt, whole or a piece of it in a stream. */
public final class CompletionChoice extends JsonView {
    CompletionChoice(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Which continuation this is.
     *
     * @return 0 to prompts times n - 1
     */
    public long index() {
        return requiredInteger("index");
    }

    /**
     * The text; in a stream, the text to append.
     *
     * @return the text, possibly empty
     */
    public String text() {
        return requiredString("text");
    }

    /**
     * Why the model stopped.
     *
     * @return the reason, empty before the end of a stream
     */
    public Optional<String> finishReason() {
        return string("finish_reason");
    }

    /**
     * Log-probabilities in the server's form, when the request asked for them.
     *
     * @return a JSON object as a map
     */
    public Optional<Map<String, Object>> logprobs() {
        return object("logprobs", map -> map);
    }
}
