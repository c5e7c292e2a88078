package io.llamarack.client;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/** Vectors for the inputs of an embedding request. */
public final class EmbeddingResponse extends JsonView {
    EmbeddingResponse(Map<String, Object> raw) {
        super(raw);
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
     * The token counts.
     *
     * @return the counts, empty when the server gave none
     */
    public Optional<Usage> usage() {
        return object("usage", Usage::new);
    }

    /**
     * The vectors, in the order of the inputs.
     *
     * @return one vector per input; the arrays are the caller's
     */
    public List<float[]> vectors() {
        List<float[]> vectors = new ArrayList<>();
        for (Map<String, Object> item : objects("data", map -> map)) {
            vectors.add(vector(item.get("embedding")));
        }
        return vectors;
    }

    private static float[] vector(Object embedding) {
        if (embedding instanceof String) {
            ByteBuffer bytes = ByteBuffer.wrap(Base64.getDecoder().decode((String) embedding));
            float[] values = new float[bytes.remaining() / Float.BYTES];
            bytes.order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer().get(values);
            return values;
        }
        if (!(embedding instanceof List)) {
            throw new MalformedResponseException("`embedding` is neither numbers nor base64: " + embedding, null);
        }
        List<?> numbers = (List<?>) embedding;
        float[] values = new float[numbers.size()];
        for (int i = 0; i < values.length; i++) {
            values[i] = ((Number) numbers.get(i)).floatValue();
        }
        return values;
    }
}
