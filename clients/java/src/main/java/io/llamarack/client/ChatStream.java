package io.llamarack.client;

import java.util.stream.Stream;

/**
 * The chunks of a chat.
 *
 * <pre>{@code
 * try (ChatStream stream = client.streamChat(request)) {
 *     stream.textStream().forEach(System.out::print);
 * }
 * }</pre>
 */
public final class ChatStream extends EventStream<ChatChunk, ChatResponse> {
    ChatStream(Call call, StreamReceiver<ChatChunk, ChatResponse> receiver) {
        super(call, receiver);
    }

    /**
     * The text of answer 0, piece by piece, without the chunks that carry none.
     *
     * @return a sequential stream
     * @throws IllegalStateException when the stream was given away before
     */
    public Stream<String> textStream() {
        return stream().map(ChatChunk::text).filter(text -> !text.isEmpty());
    }
}
