package io.llamarack.client;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/** Puts the chunks of a completion together. Log-probabilities are left to the reader of the chunks. */
final class CompletionAccumulator implements Accumulator<CompletionChunk, CompletionResponse> {
    private final Map<Long, StringBuilder> texts = new TreeMap<>();
    private final Map<Long, String> finishReasons = new HashMap<>();
    private final Map<String, Object> fields = new LinkedHashMap<>();

    @Override
    public synchronized void add(CompletionChunk chunk) {
        for (String name : List.of("id", "model", "created", "system_fingerprint", "usage")) {
            Object value = chunk.raw().get(name);
            if (value != null) {
                fields.put(name, value);
            }
        }
        for (CompletionChoice choice : chunk.choices()) {
            texts.computeIfAbsent(choice.index(), index -> new StringBuilder()).append(choice.text());
            choice.finishReason().ifPresent(reason -> finishReasons.put(choice.index(), reason));
        }
    }

    @Override
    public synchronized boolean isFinished() {
        return !texts.isEmpty() && finishReasons.keySet().containsAll(texts.keySet());
    }

    @Override
    public synchronized String text() {
        StringBuilder first = texts.get(0L);
        return first == null ? "" : first.toString();
    }

    @Override
    public synchronized CompletionResponse result() {
        List<Object> choices = new ArrayList<>();
        texts.forEach((index, text) -> {
            Map<String, Object> choice = new LinkedHashMap<>();
            choice.put("index", index);
            choice.put("text", text.toString());
            choice.put("finish_reason", finishReasons.get(index));
            choices.add(choice);
        });
        Map<String, Object> raw = new LinkedHashMap<>(fields);
        raw.put("object", "text_completion");
        raw.put("choices", choices);
        return new CompletionResponse(JsonView.freezeObject(raw));
    }
}
