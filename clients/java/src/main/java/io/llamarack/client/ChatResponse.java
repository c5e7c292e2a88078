package io.llamarack.client;

import java.util.List;
import java.util.Map;
import java.util.Optional;

/** A complete answer to a chat request. */
public final class ChatResponse extends JsonView {
    ChatResponse(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * The id of the answer.
     *
     * @return the id
     */
    public String id() {
        return requiredString("id");
    }

    /**
     * The model that answered.
     *
     * @return its id
     */
    public String model() {
        return requiredString("model");
    }

    /**
     * When the answer was made.
     *
     * @return seconds since 1970-01-01 UTC
     */
    public Optional<Long> createdUnixSeconds() {
        return integer("created");
    }

    /**
     * All answers.
     *
     * @return one per requested {@code n}
     */
    public List<ChatChoice> choices() {
        return objects("choices", ChatChoice::new);
    }

    /**
     * The token counts.
     *
     * @return the counts, empty when the server gave none
     */
    public Optional<Usage> usage() {
        return object("usage", Usage::new);
    }

    /**
     * The text of the first answer.
     *
     * @return the text; empty when the model called tools instead
     */
    public String text() {
        return choices().stream().findFirst().flatMap(choice -> choice.message().text()).orElse("");
    }
}
