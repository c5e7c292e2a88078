package io.llamarack.client;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.net.http.HttpHeaders;
import java.time.Duration;
import java.time.Instant;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;

class RetryPolicyTest {
    private static final Instant NOW = Instant.parse("2026-11-30T12:00:00Z");

    private static Optional<Duration> wait(int status, int attempt, double random, String... headers) {
        return RetryPolicy.afterStatus(status, headers(headers), attempt, NOW, () -> random);
    }

    private static HttpHeaders headers(String... pairs) {
        Map<String, List<String>> map = IntStream.range(0, pairs.length / 2).boxed()
                .collect(Collectors.toMap(i -> pairs[2 * i], i -> List.of(pairs[2 * i + 1])));
        return HttpHeaders.of(map, (name, value) -> true);
    }

    @Test
    void onlyTheFiveRetryableStatusesAreRetried() {
        List<Integer> retried = IntStream.range(300, 600).boxed()
                .filter(status -> wait(status, 0, 0.5).isPresent()).collect(Collectors.toList());
        assertEquals(List.of(408, 429, 502, 503, 504), retried);
    }

    @Test
    void serverWordOverridesTheStatus() {
        assertEquals(Optional.empty(), wait(503, 0, 0.5, "x-should-retry", "false"));
        assertEquals(Optional.of(Duration.ofMillis(250)), wait(500, 0, 0.5, "x-should-retry", "true"));
    }

    @Test
    void backoffDoublesUpToEightSecondsWithFullJitter() {
        List<Long> ceilings = IntStream.range(0, 7)
                .mapToObj(attempt -> wait(503, attempt, 1).orElseThrow().toMillis()).collect(Collectors.toList());
        assertEquals(List.of(500L, 1000L, 2000L, 4000L, 8000L, 8000L, 8000L), ceilings);
        assertEquals(Duration.ZERO, wait(503, 6, 0).orElseThrow());
    }

    @Test
    void waitAskedForIsKeptInEveryFormWithATenthMoreAtMost() {
        assertEquals(Duration.ofSeconds(7), wait(429, 0, 0, "retry-after", "7").orElseThrow());
        assertEquals(Duration.ofMillis(1500), wait(429, 0, 0, "retry-after", "1.5").orElseThrow());
        assertEquals(Duration.ofMillis(120), wait(429, 0, 0, "retry-after", "7", "retry-after-ms", "120").orElseThrow());
        assertEquals(Duration.ofSeconds(30),
                wait(429, 0, 0, "retry-after", "Mon, 30 Nov 2026 12:00:30 GMT").orElseThrow());
        assertEquals(Duration.ZERO, wait(429, 0, 1, "retry-after", "Mon, 30 Nov 2026 11:00:00 GMT").orElseThrow());
        assertEquals(Duration.ofMillis(7700), wait(429, 0, 1, "retry-after", "7").orElseThrow());
    }

    @Test
    void waitOverTwoMinutesIsLeftToTheCaller() {
        assertEquals(Duration.ofSeconds(120), wait(429, 0, 0, "retry-after", "120").orElseThrow());
        assertEquals(Optional.empty(), wait(429, 0, 0, "retry-after", "121"));
        assertEquals(Optional.empty(), wait(429, 0, 0, "retry-after", "1e300"));
    }

    @Test
    void nonsenseInTheHeaderIsAsIfItWereAbsent() {
        for (String nonsense : List.of("", "soon", "-5", "NaN", "Mon, 99 Nov 2026")) {
            assertEquals(Duration.ofMillis(250), wait(429, 0, 0.5, "retry-after", nonsense).orElseThrow(), nonsense);
        }
    }
}
