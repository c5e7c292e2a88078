package io.llamarack.client;

import java.util.Map;
import java.util.Optional;

/** A model that the server serves. */
public final class ModelInfo extends JsonView {
    ModelInfo(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * The id to send as {@code model}.
     *
     * @return the id
     */
    public String id() {
        return requiredString("id");
    }

    /**
     * Prompt plus output that one sequence can hold.
     *
     * @return a count of tokens, empty when the server does not say
     */
    public Optional<Long> maxContextTokens() {
        return integer("max_model_len");
    }
}
