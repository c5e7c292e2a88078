package io.llamarack.client;

import java.util.List;
import java.util.Map;
import java.util.Optional;

/** The tokens of a text. */
public final class TokenizeResponse extends JsonView {
    TokenizeResponse(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Prompt plus output that one sequence can hold.
     *
     * @return a count of tokens, empty when the server does not say
     */
    public Optional<Long> maxContextTokens() {
        return integer("max_model_len");
    }

    /**
     * How many tokens the text has.
     *
     * @return a count of tokens
     */
    public long count() {
        return integer("count").orElseGet(() -> (long) tokens().length);
    }

    /**
     * The ids of the tokens.
     *
     * @return the ids; the array is the caller's
     */
    public int[] tokens() {
        Object value = raw().get("tokens");
        if (!(value instanceof List)) {
            throw new MalformedResponseException("`tokens` of TokenizeResponse is not a list: " + value, null);
        }
        return ((List<?>) value).stream().mapToInt(id -> ((Number) id).intValue()).toArray();
    }
}
