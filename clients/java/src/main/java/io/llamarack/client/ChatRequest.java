package io.llamarack.client;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A dialogue to continue. Immutable; may be sent any number of times. */
public final class ChatRequest extends JsonView {
    private ChatRequest(Map<String, Object> raw) {
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

    /**
     * A request with one user turn.
     *
     * @param model the model's id
     * @param text what the user says
     * @return the request
     */
    public static ChatRequest of(String model, String text) {
        return builder().model(model).message(Message.user(text)).build();
    }

    /** Collects the fields; only what is set is sent. */
    public static final class Builder {
        private final Map<String, Object> fields = new LinkedHashMap<>();
        private final List<Object> messages = new ArrayList<>();
        private final List<Object> tools = new ArrayList<>();

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
         * Appends a turn.
         *
         * @param message the turn
         * @return this
         */
        public Builder message(Message message) {
            messages.add(message.raw());
            return this;
        }

        /**
         * Appends turns.
         *
         * @param turns the turns, in order
         * @return this
         */
        public Builder messages(List<Message> turns) {
            turns.forEach(this::message);
            return this;
        }

        /**
         * Offers a function that the model may ask to call.
         *
         * @param name its name
         * @param description what it does, for the model
         * @param parametersSchema the JSON schema of its arguments
         * @return this
         */
        public Builder tool(String name, String description, Map<String, Object> parametersSchema) {
            tools.add(Map.of("type", "function", "function",
                    Map.of("name", name, "description", description, "parameters", parametersSchema)));
            return this;
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
         * @throws IllegalArgumentException when the model or the messages are missing
         */
        public ChatRequest build() {
            if (!fields.containsKey("model")) {
                throw new IllegalArgumentException(
                        "`model` is not set: builder().model(ID), with an ID from client.models()");
            }
            if (messages.isEmpty()) {
                throw new IllegalArgumentException("`messages` is empty: builder().message(Message.user(TEXT))");
            }
            fields.put("messages", messages);
            if (!tools.isEmpty()) {
                fields.put("tools", tools);
            }
            return new ChatRequest(freezeObject(fields));
        }
    }
}
