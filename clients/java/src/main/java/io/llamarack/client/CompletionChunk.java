package io.llamarack.client;

import java.util.List;
import java.util.Map;
import java.util.Optional;

/** One event of a completion stream. */
public final class CompletionChunk extends JsonView {
    CompletionChunk(Map<String, Object> raw) {
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
     * The continuations.
     *
     * @return the additions; empty in the chunk that carries the usage
     */
    public List<CompletionChoice> choices() {
        return objects("choices", CompletionChoice::new);
    }

    /**
     * The token counts, in the last chunk only.
     *
     * @return the counts, empty when the server gave none
     */
    public Optional<Usage> usage() {
        return object("usage", Usage::new);
    }

    /**
     * The text of continuation 0.
     *
     * @return the text, possibly empty
     */
    public String text() {
        StringBuilder text = new StringBuilder();
        for (CompletionChoice choice : choices()) {
            if (choice.index() == 0) {
                text.append(choice.text());
            }
        }
        return text.toString();
    }
}
