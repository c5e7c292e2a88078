/**
 * A client of a llamarack gateway, or of any server that speaks the OpenAI API.
 *
 * <p>{@link io.llamarack.client.LlamarackClient} is the way in. Durations are {@link java.time.Duration};
 * lengths of text are counted in tokens of the model. Nothing here is null unless its documentation says so.
 */
package io.llamarack.client;
