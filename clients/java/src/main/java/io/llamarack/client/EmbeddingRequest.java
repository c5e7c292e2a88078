package io.llamarack.client;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Texts to turn into vectors. Immutable. */
public final class EmbeddingRequest extends JsonView {
    private EmbeddingRequest(Map<String, Object> raw) {
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
         * The texts.
         *
         * @param value at least one
         * @return this
         */
        public Builder input(List<String> value) {
            return field("input", value);
        }

        /**
         * The length of the vectors, for models that can shorten theirs.
         *
         * @param value at least 1
         * @return this
         */
        public Builder dimensions(int value) {
            return field("dimensions", value);
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
         * @throws IllegalArgumentException when the model or the input is missing
         */
        public EmbeddingRequest build() {
            if (!fields.containsKey("model")) {
                throw new IllegalArgumentException(
                        "`model` is not set: builder().model(ID), with an ID from client.models()");
            }
            if (!fields.containsKey("input")) {
                throw new IllegalArgumentException("`input` is not set: builder().input(List.of(TEXT))");
            }
            // A quarter of the bytes of decimal numbers, and exact: little-endian 32-bit floats.
            fields.putIfAbsent("encoding_format", "base64");
            return new EmbeddingRequest(freezeObject(fields));
        }
    }
}
