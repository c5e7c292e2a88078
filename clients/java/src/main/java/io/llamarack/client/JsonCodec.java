package io.llamarack.client;

import java.util.Map;

/**
 * Turns JSON text into plain Java values and back, so that no JSON library shows in this client's API.
 *
 * <p>The default uses Jackson 2. With Jackson 3, or any other library, implement these two methods and
 * give the codec to {@link LlamarackClientBuilder#jsonCodec(JsonCodec)}.
 */
public interface JsonCodec {
    /**
     * Reads one JSON object.
     *
     * @param json UTF-8 text
     * @return maps, lists, strings, numbers, booleans and nulls
     * @throws Exception when the text is not a JSON object
     */
    Map<String, Object> read(byte[] json) throws Exception;

    /**
     * Writes one JSON object.
     *
     * @param value maps, lists, strings, numbers, booleans and nulls
     * @return UTF-8 text on one line
     * @throws Exception when a value has another type
     */
    byte[] write(Map<String, Object> value) throws Exception;
}
