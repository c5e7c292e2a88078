package io.llamarack.client;

import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.Function;

/**
 * An immutable typed view of one JSON object. Fields without an accessor are kept in {@link #raw()}.
 *
 * <p>JSON values are plain Java values: {@code Map<String, Object>}, {@code List<Object>}, {@code String},
 * {@code Number}, {@code Boolean} and null.
 */
public abstract class JsonView {
    private final Map<String, Object> raw;

    JsonView(Map<String, Object> raw) {
        this.raw = raw;
    }

    /**
     * The whole object as it came, or as it will be sent.
     *
     * @return an unmodifiable map
     */
    public final Map<String, Object> raw() {
        return raw;
    }

    /** {@return true for a view of the same kind and content} */
    @Override
    public final boolean equals(Object other) {
        return other != null && other.getClass() == getClass() && ((JsonView) other).raw.equals(raw);
    }

    @Override
    public final int hashCode() {
        return raw.hashCode();
    }

    @Override
    public final String toString() {
        return getClass().getSimpleName() + raw;
    }

    final Optional<String> string(String name) {
        Object value = raw.get(name);
        return value instanceof String ? Optional.of((String) value) : Optional.empty();
    }

    final String requiredString(String name) {
        return string(name).orElseThrow(() -> missing(name, "a string"));
    }

    final Optional<Long> integer(String name) {
        Object value = raw.get(name);
        return value instanceof Number ? Optional.of(((Number) value).longValue()) : Optional.empty();
    }

    final long requiredInteger(String name) {
        return integer(name).orElseThrow(() -> missing(name, "a number"));
    }

    final <T> Optional<T> object(String name, Function<Map<String, Object>, T> view) {
        Object value = raw.get(name);
        return value instanceof Map ? Optional.of(view.apply(asObject(value))) : Optional.empty();
    }

    final <T> List<T> objects(String name, Function<Map<String, Object>, T> view) {
        Object value = raw.get(name);
        if (!(value instanceof List)) {
            return List.of();
        }
        List<T> views = new ArrayList<>();
        for (Object item : (List<?>) value) {
            if (!(item instanceof Map)) {
                throw missing(name, "a list of objects");
            }
            views.add(view.apply(asObject(item)));
        }
        return Collections.unmodifiableList(views);
    }

    private MalformedResponseException missing(String name, String wanted) {
        return new MalformedResponseException(
                "`" + name + "` of " + getClass().getSimpleName() + " is not " + wanted + ": " + raw.get(name), null);
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> asObject(Object value) {
        return (Map<String, Object>) value;
    }

    /** Copies maps and lists all the way down, so that nobody can change them later. */
    static Object freeze(Object value) {
        if (value instanceof Map) {
            Map<String, Object> copy = new LinkedHashMap<>();
            ((Map<?, ?>) value).forEach((name, item) -> copy.put((String) name, freeze(item)));
            return Collections.unmodifiableMap(copy);
        }
        if (value instanceof List) {
            List<Object> copy = new ArrayList<>(((List<?>) value).size());
            ((List<?>) value).forEach(item -> copy.add(freeze(item)));
            return Collections.unmodifiableList(copy);
        }
        return value;
    }

    static Map<String, Object> freezeObject(Map<String, Object> value) {
        return asObject(freeze(value));
    }
}
