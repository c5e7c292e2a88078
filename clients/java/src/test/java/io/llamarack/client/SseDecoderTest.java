package io.llamarack.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import org.junit.jupiter.api.Test;

class SseDecoderTest {
    private static List<String> decode(String stream, int... cuts) {
        List<String> events = new ArrayList<>();
        SseDecoder decoder = new SseDecoder(1000, (name, data) -> events.add(name + "|" + data));
        byte[] bytes = stream.getBytes(StandardCharsets.UTF_8);
        int from = 0;
        for (int cut : cuts) {
            decoder.feed(ByteBuffer.wrap(bytes, from, cut - from));
            from = cut;
        }
        decoder.feed(ByteBuffer.wrap(bytes, from, bytes.length - from));
        decoder.end();
        return events;
    }

    @Test
    void plainEventIsDelivered() {
        assertEquals(List.of("|{}"), decode("data: {}\n\n"));
    }

    @Test
    void everyLineEndingIsAccepted() {
        assertEquals(List.of("|a", "|b", "|c"), decode("data: a\r\n\r\ndata: b\r\rdata: c\n\n"));
    }

    @Test
    void carriageReturnAndLineFeedInSeparateReadsEndOneLine() {
        String stream = "data: a\r\ndata: b\r\n\r\n";
        assertEquals(List.of("|a\nb"), decode(stream, stream.indexOf('\n')));
    }

    @Test
    void byteOrderMarkIsSkippedOnceOnly() {
        assertEquals(List.of("|a", "|\uFEFFb"), decode("\uFEFFdata: a\n\ndata: \uFEFFb\n\n"));
    }

    @Test
    void commentsIdsRetriesAndUnknownFieldsAreIgnored() {
        assertEquals(List.of("|a", "|b"),
                decode(": ka\n\nid: 1\nretry: 5\nfoo: x\ndata: a\n\n:\n: no empty line after this\ndata: b\n\n"));
    }

    @Test
    void severalDataLinesMakeOneEvent() {
        assertEquals(List.of("|a\n\nb"), decode("data: a\ndata\ndata:b\n\n"));
    }

    @Test
    void onlyOneSpaceAfterTheColonIsDropped() {
        assertEquals(List.of("|  a"), decode("data:   a\n\n"));
    }

    @Test
    void eventNameHoldsForOneEventOnly() {
        assertEquals(List.of("error|a", "|b"), decode("event: error\ndata: a\n\ndata: b\n\n"));
        assertEquals(List.of("|b"), decode("event: ping\n\ndata: b\n\n"));
    }

    @Test
    void lastEventWithoutItsEmptyLineIsDelivered() {
        assertEquals(List.of("|a"), decode("data: a"));
        assertEquals(List.of("|a"), decode("data: a\n"));
    }

    @Test
    void resultIsTheSameHoweverTheBytesAreCut() {
        String stream = "\uFEFF: ka\r\n\r\nevent: x\r\ndata: \uD83E\uDD99\u6F22\u00E9\r\ndata: b\r\n\r\ndata: end\n\n";
        List<String> whole = decode(stream);
        assertEquals(List.of("x|\uD83E\uDD99\u6F22\u00E9\nb", "|end"), whole);
        int length = stream.getBytes(StandardCharsets.UTF_8).length;
        for (int cut = 0; cut <= length; cut++) {
            assertEquals(whole, decode(stream, cut));
        }
        Random random = new Random(7);
        for (int round = 0; round < 200; round++) {
            assertEquals(whole, decode(stream, random.ints(6, 0, length).sorted().toArray()));
        }
    }

    @Test
    void eventOverTheLimitIsRefusedWithTheLimitInTheMessage() {
        MalformedResponseException failure = assertThrows(
                MalformedResponseException.class, () -> decode("data: " + "x".repeat(1000)));
        assertEquals("an event of the stream is larger than the limit of 1000 bytes", failure.getMessage());
    }

    @Test
    void limitHoldsForOneEventNotForTheStream() {
        String event = "data: " + "x".repeat(500) + "\n\n";
        assertEquals(10, decode(event.repeat(10)).size());
        assertEquals(0, decode((": " + "x".repeat(500) + "\n").repeat(10)).size());
    }
}
