package io.llamarack.client;

import java.util.List;
import java.util.Map;
import java.util.Optional;

/** What one chunk adds to one answer of a chat. */
public final class ChatDelta extends JsonView {
    ChatDelta(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Which of the {@code n} answers this adds to.
     *
     * @return 0 to n - 1
     */
    public long index() {
        return requiredInteger("index");
    }

    /**
     * Set in the last chunk of this answer.
     *
     * @return the reason, empty before the end
     */
    public Optional<String> finishReason() {
        return string("finish_reason");
    }

    /**
     * Text to append.
     *
     * @return the text, possibly empty
     */
    public String text() {
        return delta().string("content").orElse("");
    }

    /**
     * Reasoning text to append, of models that show theirs.
     *
     * @return the text, possibly empty
     */
    public String reasoning() {
        return delta().string("reasoning_content").orElse("");
    }

    /** The fragments of tool calls, in the server's form. */
    List<Map<String, Object>> toolCallFragments() {
        return delta().objects("tool_calls", fragment -> fragment);
    }

    private ChatDelta delta() {
        return object("delta", ChatDelta::new).orElse(new ChatDelta(Map.of()));
    }
}
