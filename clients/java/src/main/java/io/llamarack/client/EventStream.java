package io.llamarack.client;

import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.Spliterator;
import java.util.Spliterators;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * An answer on its way: read it once, by iterator, {@link #stream()} or {@link #publisher()}, and close it.
 *
 * <p>Closing an unfinished stream closes the connection, and the server stops generating. Reading throws
 * {@link StreamErrorException}, {@link StreamTruncatedException}, {@link CallTimeoutException},
 * {@link CallCancelledException}, {@link TransportException} or {@link MalformedResponseException}, after
 * the chunks that came before.
 *
 * @param <T> one chunk
 * @param <R> the whole answer
 */
public abstract class EventStream<T, R> implements Iterable<T>, AutoCloseable {
    private final Call call;
    private final StreamReceiver<T, R> receiver;
    private final AtomicBoolean claimed = new AtomicBoolean();
    private final AtomicBoolean published = new AtomicBoolean();

    EventStream(Call call, StreamReceiver<T, R> receiver) {
        this.call = call;
        this.receiver = receiver;
    }

    /**
     * The chunks, waiting for each.
     *
     * @return an iterator
     * @throws IllegalStateException when the stream was given away before
     */
    @Override
    public final Iterator<T> iterator() {
        claim();
        return new Iterator<>() {
            private T next;
            private boolean over;

            @Override
            public boolean hasNext() {
                if (next == null && !over) {
                    next = take();
                    over = next == null;
                }
                return next != null;
            }

            @Override
            public T next() {
                if (!hasNext()) {
                    throw new NoSuchElementException();
                }
                T current = next;
                next = null;
                return current;
            }
        };
    }

    /**
     * The chunks, waiting for each. Closing the returned stream closes this one.
     *
     * @return a sequential stream
     * @throws IllegalStateException when the stream was given away before
     */
    public final Stream<T> stream() {
        int characteristics = Spliterator.ORDERED | Spliterator.NONNULL | Spliterator.IMMUTABLE;
        return StreamSupport.stream(Spliterators.spliteratorUnknownSize(iterator(), characteristics), false)
                .onClose(this::close);
    }

    /**
     * The chunks without a waiting thread. Takes one subscriber and sends it what it requests; cancelling
     * the subscription closes the stream. Signals come on the client's threads and must not block.
     *
     * @return a publisher
     */
    public final Flow.Publisher<T> publisher() {
        return subscriber -> {
            if (claimed.compareAndSet(false, true)) {
                published.set(true);
                receiver.pipe().subscribe(subscriber, this::close);
            } else {
                refuse(subscriber);
            }
        };
    }

    /**
     * Reads the rest and puts all chunks together, those read before included.
     *
     * @return the same type that the call without a stream returns
     * @throws IllegalStateException when a subscriber reads the stream: use {@link #completion()}
     */
    public final R result() {
        if (published.get()) {
            throw new IllegalStateException("a subscriber reads this stream: use completion()");
        }
        claimed.set(true);
        while (take() != null) {
            // take() adds nothing: each chunk was put together when it came.
        }
        return receiver.result();
    }

    /**
     * Completes with the whole answer when its last chunk has come, or with the stream's exception. The
     * stream must be read for this to happen. Completing or cancelling it from outside changes nothing.
     *
     * @return a future
     */
    public final CompletableFuture<R> completion() {
        return receiver.completion().copy();
    }

    /**
     * The id under which the server logs this request.
     *
     * @return the {@code x-request-id} header, empty when the server sent none
     */
    public final Optional<String> requestId() {
        return receiver.headers().firstValue("x-request-id");
    }

    /** The same as {@link #close()}; may be called from any thread. */
    public final void cancel() {
        close();
    }

    /** Ends the stream. A thread that waits for a chunk gets {@link CallCancelledException}. */
    @Override
    public final void close() {
        call.cancel("the stream was closed", null);
    }

    private T take() {
        try {
            return receiver.pipe().take();
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
            call.cancel("the reading thread was interrupted", interrupted);
            throw new CallCancelledException("the reading thread was interrupted", interrupted);
        }
    }

    private void claim() {
        if (!claimed.compareAndSet(false, true)) {
            throw new IllegalStateException("a stream can be read once only");
        }
    }

    private static void refuse(Flow.Subscriber<?> subscriber) {
        subscriber.onSubscribe(new Flow.Subscription() {
            @Override
            public void request(long count) {}

            @Override
            public void cancel() {}
        });
        subscriber.onError(new IllegalStateException("a stream can be read once only"));
    }
}
