package io.llamarack.client;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/** One turn of a dialogue. Immutable. */
public final class Message extends JsonView {
    Message(Map<String, Object> raw) {
        super(raw);
    }

    /**
     * Instructions that hold for the whole dialogue.
     *
     * @param text the instructions
     * @return a message
     */
    public static Message system(String text) {
        return of("system", text);
    }

    /**
     * What the user says.
     *
     * @param text the text
     * @return a message
     */
    public static Message user(String text) {
        return of("user", text);
    }

    /**
     * What the model said earlier.
     *
     * @param text the text
     * @return a message
     */
    public static Message assistant(String text) {
        return of("assistant", text);
    }

    /**
     * The answer of a tool.
     *
     * @param toolCallId the id of the {@link ToolCall} answered
     * @param text the tool's answer
     * @return a message
     */
    public static Message tool(String toolCallId, String text) {
        Map<String, Object> raw = new LinkedHashMap<>();
        raw.put("role", "tool");
        raw.put("tool_call_id", toolCallId);
        raw.put("content", text);
        return new Message(freezeObject(raw));
    }

    /**
     * A message with any content, for parts (images) or roles without a method of their own.
     *
     * @param raw the message as the API defines it
     * @return a message
     */
    public static Message of(Map<String, Object> raw) {
        return new Message(freezeObject(raw));
    }

    private static Message of(String role, String text) {
        Map<String, Object> raw = new LinkedHashMap<>();
        raw.put("role", role);
        raw.put("content", text);
        return new Message(freezeObject(raw));
    }

    /**
     * Who speaks.
     *
     * @return {@code system}, {@code user}, {@code assistant} or {@code tool}
     */
    public String role() {
        return requiredString("role");
    }

    /**
     * The text.
     *
     * @return the text, empty when there is none (a turn of tool calls) or it is made of parts
     */
    public Optional<String> text() {
        return string("content");
    }

    /**
     * The reasoning that precedes the text, of models that show theirs.
     *
     * @return the text, empty when there is none
     */
    public Optional<String> reasoning() {
        return string("reasoning_content");
    }

    /**
     * The tools that the model wants called.
     *
     * @return the calls, possibly none
     */
    public List<ToolCall> toolCalls() {
        return objects("tool_calls", ToolCall::new);
    }
}
