package io.llamarack.client;

import java.util.stream.Stream;

/**
 * The chunks of a completion.
 *
 * <pre>{@code
 * try (CompletionStream stream = client.streamComplete(request)) {
 *     stream.textStream().forEach(System.out::print);
 * }
 * }</pre>
 */
public final class CompletionStream extends EventStream<CompletionChunk, CompletionResponse> {
    CompletionStream(Call call, StreamReceiver<CompletionChunk, CompletionResponse> receiver) {
        super(call, receiver);
    }

    /**
     * The text of answer 0, piece by piece, without the chunks that carry none.
     *
     * @return a sequential stream
     * @throws IllegalStateException when the stream was given away before
     */
    public Stream<String> textStream() {
        return stream().map(CompletionChunk::text).filter(text -> !text.isEmpty());
    }
}
