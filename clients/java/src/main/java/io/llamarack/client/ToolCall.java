package io.llamarack.client;

import java.util.Map;

/** A call of one of the request's tools, written by the model. */
public final class ToolCall extends JsonView {
    ToolCall(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * The id which the tool's answer repeats.
     *
     * @return the id
     */
    public String id() {
        return requiredString("id");
    }

    /**
     * The name of the tool.
     *
     * @return the name
     */
    public String name() {
        return function().requiredString("name");
    }

    /**
     * The arguments, as the model wrote them: JSON text, not necessarily valid.
     *
     * @return JSON text
     */
    public String arguments() {
        return function().string("arguments").orElse("");
    }

    private ToolCall function() {
        return object("function", ToolCall::new).orElseThrow(
                () -> new MalformedResponseException("`function` of ToolCall is missing: " + raw(), null));
    }
}
