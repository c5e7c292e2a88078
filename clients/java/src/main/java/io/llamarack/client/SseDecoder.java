package io.llamarack.client;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.function.BiConsumer;

/**
 * Bytes of a {@code text/event-stream} in, events out. No I/O, not thread-safe.
 *
 * <p>Lines are cut as bytes and decoded whole, so a character split over two reads is never seen in
 * halves. Accepts LF, CRLF and CR, a byte order mark, comments, several data lines per event, and a last
 * event without its empty line. The consumer gets the event's name (empty when unnamed) and its data.
 */
final class SseDecoder {
    /** The largest event; far above any chunk of an answer, below what endangers the heap. */
    static final int MAX_EVENT_BYTES = 16 * 1024 * 1024;

    private static final byte[] BYTE_ORDER_MARK = {(byte) 0xEF, (byte) 0xBB, (byte) 0xBF};

    private final int maxEventBytes;
    private final BiConsumer<String, String> consumer;
    private byte[] line = new byte[512];
    private int lineLength;
    private boolean afterCarriageReturn;
    private boolean firstLine = true;
    private String name = "";
    private StringBuilder data;
    private int eventBytes;

    SseDecoder(int maxEventBytes, BiConsumer<String, String> consumer) {
        this.maxEventBytes = maxEventBytes;
        this.consumer = consumer;
    }

    /** Takes all bytes of the buffer. */
    void feed(ByteBuffer bytes) {
        while (bytes.hasRemaining()) {
            byte b = bytes.get();
            if (b == '\n' && afterCarriageReturn) {
                afterCarriageReturn = false;
            } else if (b == '\n' || b == '\r') {
                afterCarriageReturn = b == '\r';
                endLine();
            } else {
                afterCarriageReturn = false;
                append(b);
            }
        }
    }

    /** The stream is over: delivers an event that lacks its empty line. */
    void end() {
        if (lineLength > 0) {
            endLine();
        }
        dispatch();
    }

    private void append(byte b) {
        if (++eventBytes > maxEventBytes) {
            throw new MalformedResponseException(
                    "an event of the stream is larger than the limit of " + maxEventBytes + " bytes", null);
        }
        if (lineLength == line.length) {
            line = Arrays.copyOf(line, line.length * 2);
        }
        line[lineLength++] = b;
    }

    private void endLine() {
        int start = 0;
        if (firstLine) {
            firstLine = false;
            start = lineLength >= 3 && Arrays.equals(line, 0, 3, BYTE_ORDER_MARK, 0, 3) ? 3 : 0;
        }
        String text = new String(line, start, lineLength - start, StandardCharsets.UTF_8);
        lineLength = 0;
        if (text.isEmpty()) {
            dispatch();
        } else {
            field(text);
        }
    }

    private void field(String text) {
        int colon = text.indexOf(':');
        String field = colon < 0 ? text : text.substring(0, colon);
        String value = colon < 0 ? "" : text.substring(colon + (text.startsWith(": ", colon) ? 2 : 1));
        if (field.equals("data")) {
            if (data == null) {
                data = new StringBuilder(value);
            } else {
                data.append('\n').append(value);
            }
        } else if (field.equals("event")) {
            name = value;
        } else if (data == null) {
            // A comment (no name before the colon), `id`, `retry` or an unknown field holds nothing back.
            eventBytes = 0;
        }
    }

    private void dispatch() {
        String finished = data == null ? null : data.toString();
        String finishedName = name;
        data = null;
        name = "";
        eventBytes = 0;
        if (finished != null) {
            consumer.accept(finishedName, finished);
        }
    }
}
