package io.llamarack.client;

import com.fasterxml.jackson.core.type.TypeReference;
import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.util.Map;

/** The default codec; the only class that knows Jackson 2. */
final class JacksonCodec implements JsonCodec {
    private static final TypeReference<Map<String, Object>> OBJECT = new TypeReference<>() {};

    private final ObjectMapper mapper =
            new ObjectMapper().enable(DeserializationFeature.FAIL_ON_TRAILING_TOKENS);

    @Override
    public Map<String, Object> read(byte[] json) throws IOException {
        Map<String, Object> value = mapper.readValue(json, OBJECT);
        if (value == null) {
            throw new IOException("null instead of an object");
        }
        return value;
    }

    @Override
    public byte[] write(Map<String, Object> value) throws IOException {
        return mapper.writeValueAsBytes(value);
    }
}
