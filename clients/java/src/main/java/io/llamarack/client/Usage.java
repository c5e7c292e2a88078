package io.llamarack.client;

import java.util.Map;
import java.util.Optional;

/** Tokens counted by the server for one call. */
public final class Usage extends JsonView {
    Usage(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Tokens of the prompt, template included.
     *
     * @return a count of tokens
     */
    public long promptTokens() {
        return requiredInteger("prompt_tokens");
    }

    /**
     * Tokens generated.
     *
     * @return a count of tokens, empty where nothing is generated (embeddings)
     */
    public Optional<Long> completionTokens() {
        return integer("completion_tokens");
    }

    /**
     * Prompt and completion together.
     *
     * @return a count of tokens
     */
    public long totalTokens() {
        return requiredInteger("total_tokens");
    }

    /**
     * Prompt tokens that the server took from its prefix cache.
     *
     * @return a count of tokens, empty when the server does not say
     */
    public Optional<Long> cachedPromptTokens() {
        return object("prompt_tokens_details", Usage::new).flatMap(details -> details.integer("cached_tokens"));
    }
}
