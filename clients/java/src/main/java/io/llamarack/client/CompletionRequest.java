package io.llamarack.client;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A text to continue, without a chat template. Immutable; may be sent any number of times. */
public final class CompletionRequest extends JsonView {
    private CompletionRequest(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Starts an empty request.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Collects the fields; only what is set is sent. */
    public static final class Builder {
        private final Map<String, Object> fields = new LinkedHashMap<>();

        /**
         * The model to ask.
         *
         * @param value an id from {@link LlamarackClient#models()}
         * @return this
         */
        public Builder model(String value) {
            return field("model", value);
        }

        /**
         * The text to continue.
         *
         * @param value the text
         * @return this
         */
        public Builder prompt(String value) {
            return field("prompt", value);
        }

        /**
         * Several texts, each continued on its own.
         *
         * @param value the texts
         * @return this
         */
        public Builder prompts(List<String> value) {
            return field("prompt", value);
        }

        /**
         * Asks for log-probabilities.
         *
         * @param value how many alternatives per token
         * @return this
         */
        public Builder logprobs(int value) {
            return field("logprobs", value);
        }

        /**
         * The most tokens to generate.
         *
         * @param value a count of tokens, at least 1
         * @return this
         */
        public Builder maxTokens(int value) {
            return field("max_tokens", value);
        }

        /**
         * Randomness of the choice of tokens.
         *
         * @param value 0 (always the likeliest) to 2
         * @return this
         */
        public Builder temperature(double value) {
            return field("temperature", value);
        }

        /**
         * Only the likeliest tokens up to this share are chosen from.
         *
         * @param value over 0, to 1
         * @return this
         */
        public Builder topP(double value) {
            return field("top_p", value);
        }

        /**
         * How many answers to make.
         *
         * @param value at least 1
         * @return this
         */
        public Builder n(int value) {
            return field("n", value);
        }

        /**
         * Makes random choices repeatable, as far as the engine can.
         *
         * @param value any number
         * @return this
         */
        public Builder seed(long value) {
            return field("seed", value);
        }

        /**
         * Texts at which to stop; they are not part of the answer.
         *
         * @param value the texts
         * @return this
         */
        public Builder stop(List<String> value) {
            return field("stop", value);
        }

        /**
         * Any other field of the API, or an extension of the server ({@code top_k}, {@code min_p}).
         *
         * @param name the JSON name
         * @param value a JSON value of plain Java types
         * @return this
         */
        public Builder field(String name, Object value) {
            fields.put(name, value);
            return this;
        }

        /**
         * Makes the request.
         *
         * @return the request
         * @throws IllegalArgumentException when the model or the prompt is missing
         */
        public CompletionRequest build() {
            if (!fields.containsKey("model")) {
                throw new IllegalArgumentException(
                        "`model` is not set: builder().model(ID), with an ID from client.models()");
            }
            if (!fields.containsKey("prompt")) {
                throw new IllegalArgumentException("`prompt` is not set: builder().prompt(TEXT)");
            }
            return new CompletionRequest(freezeObject(fields));
        }
    }
}
