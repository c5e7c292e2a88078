package io.llamarack.client;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/** Puts the chunks of a chat together. */
final class ChatAccumulator implements Accumulator<ChatChunk, ChatResponse> {
    private final Map<Long, Choice> choices = new TreeMap<>();
    private final Map<String, Object> fields = new LinkedHashMap<>();

    @Override
    public synchronized void add(ChatChunk chunk) {
        for (String name : List.of("id", "model", "created", "system_fingerprint", "usage")) {
            Object value = chunk.raw().get(name);
            if (value != null) {
                fields.put(name, value);
            }
        }
        for (ChatDelta delta : chunk.choices()) {
            choices.computeIfAbsent(delta.index(), index -> new Choice()).add(delta);
        }
    }

    @Override
    public synchronized boolean isFinished() {
        return !choices.isEmpty() && choices.values().stream().allMatch(choice -> choice.finishReason != null);
    }

    @Override
    public synchronized String text() {
        Choice first = choices.get(0L);
        return first == null ? "" : first.text.toString();
    }

    @Override
    public synchronized ChatResponse result() {
        List<Object> list = new ArrayList<>();
        choices.forEach((index, choice) -> list.add(choice.toJson(index)));
        Map<String, Object> raw = new LinkedHashMap<>(fields);
        raw.put("object", "chat.completion");
        raw.put("choices", list);
        return new ChatResponse(JsonView.freezeObject(raw));
    }

    private static final class Choice {
        private final StringBuilder text = new StringBuilder();
        private final StringBuilder reasoning = new StringBuilder();
        private final Map<Long, Tool> tools = new TreeMap<>();
        private String finishReason;

        void add(ChatDelta delta) {
            text.append(delta.text());
            reasoning.append(delta.reasoning());
            for (Map<String, Object> fragment : delta.toolCallFragments()) {
                Object index = fragment.get("index");
                long key = index instanceof Number ? ((Number) index).longValue() : 0;
                tools.computeIfAbsent(key, absent -> new Tool()).add(fragment);
            }
            delta.finishReason().ifPresent(reason -> finishReason = reason);
        }

        Map<String, Object> toJson(long index) {
            Map<String, Object> message = new LinkedHashMap<>();
            message.put("role", "assistant");
            message.put("content", text.length() == 0 && !tools.isEmpty() ? null : text.toString());
            if (reasoning.length() > 0) {
                message.put("reasoning_content", reasoning.toString());
            }
            if (!tools.isEmpty()) {
                List<Object> calls = new ArrayList<>();
                tools.values().forEach(tool -> calls.add(tool.toJson()));
                message.put("tool_calls", calls);
            }
            Map<String, Object> choice = new LinkedHashMap<>();
            choice.put("index", index);
            choice.put("message", message);
            choice.put("finish_reason", finishReason);
            return choice;
        }
    }

    /** Id and name come once; the arguments come in pieces. */
    private static final class Tool {
        private final StringBuilder arguments = new StringBuilder();
        private String id = "";
        private String name = "";

        void add(Map<String, Object> fragment) {
            id = firstSet(id, fragment.get("id"));
            Object function = fragment.get("function");
            if (function instanceof Map) {
                name = firstSet(name, ((Map<?, ?>) function).get("name"));
                Object piece = ((Map<?, ?>) function).get("arguments");
                arguments.append(piece == null ? "" : piece);
            }
        }

        private static String firstSet(String current, Object next) {
            return current.isEmpty() && next != null ? next.toString() : current;
        }

        Map<String, Object> toJson() {
            return Map.of("id", id, "type", "function",
                    "function", Map.of("name", name, "arguments", arguments.toString()));
        }
    }
}
