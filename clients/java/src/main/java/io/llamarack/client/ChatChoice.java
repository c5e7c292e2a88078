package io.llamarack.client;

import java.util.Map;
import java.util.Optional;

/** One of the answers to a chat request. */
public final class ChatChoice extends JsonView {
    ChatChoice(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Which of the {@code n} answers this is.
     *
     * @return 0 to n - 1
     */
    public long index() {
        return requiredInteger("index");
    }

    /**
     * Why the model stopped: {@code stop}, {@code length}, {@code tool_calls} or {@code content_filter}.
     *
     * @return the reason, empty when the server gave none
     */
    public Optional<String> finishReason() {
        return string("finish_reason");
    }

    /**
     * The model's turn.
     *
     * @return the message
     */
    public Message message() {
        return object("message", Message::new).orElseThrow(
                () -> new MalformedResponseException("`message` of ChatChoice is missing: " + raw(), null));
    }
}
