package io.llamarack.client;

import java.util.List;
import java.util.Map;
import java.util.Optional;

/** One event of a chat stream. */
public final class ChatChunk extends JsonView {
    ChatChunk(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * The id of the answer, the same in all its chunks.
     *
     * @return the id
     */
    public String id() {
        return requiredString("id");
    }

    /**
     * The model that answers.
     *
     * @return its id
     */
    public String model() {
        return requiredString("model");
    }

    /**
     * What this event adds.
     *
     * @return the additions; empty in the chunk that carries the usage
     */
    public List<ChatDelta> choices() {
        return objects("choices", ChatDelta::new);
    }

    /**
     * The token counts, in the last chunk only.
     *
     * @return the counts
     */
    public Optional<Usage> usage() {
        return object("usage", Usage::new);
    }

    /**
     * Text that this event adds to answer 0.
     *
     * @return the text, possibly empty
     */
    public String text() {
        StringBuilder text = new StringBuilder();
        for (ChatDelta choice : choices()) {
            if (choice.index() == 0) {
                text.append(choice.text());
            }
        }
        return text.toString();
    }
}
