package io.llamarack.client;

import java.net.http.HttpHeaders;
import java.time.DateTimeException;
import java.time.Duration;
import java.time.Instant;
import java.time.ZonedDateTime;
import java.time.format.DateTimeFormatter;
import java.util.Optional;
import java.util.Set;
import java.util.function.DoubleSupplier;

/** When to try again, and after how long. Pure: the clock and the random source are arguments. */
final class RetryPolicy {
    /** 408 and 429 are the client's turn to wait; 502, 503, 504 are a gateway without a backend. */
    private static final Set<Integer> RETRYABLE = Set.of(408, 429, 502, 503, 504);

    /**
     * The same conditions, told inside a stream: a server that accepts a stream before it has room for it can
     * say so only there.
     */
    private static final Set<String> RETRYABLE_CODES =
            Set.of("server_is_overloaded", "model_not_ready", "rate_limit_exceeded", "upstream_failed");

    /** A longer Retry-After is the caller's decision, as in the OpenAI clients. */
    private static final Duration MAX_RETRY_AFTER = Duration.ofSeconds(120);

    private static final double FIRST_BACKOFF_SECONDS = 0.5;
    private static final double MAX_BACKOFF_SECONDS = 8;

    private RetryPolicy() {}

    /**
     * The wait before the next attempt after an error status, or empty when there should be none.
     *
     * @param attempt 0 for the first attempt that failed
     */
    static Optional<Duration> afterStatus(
            int status, HttpHeaders headers, int attempt, Instant now, DoubleSupplier random) {
        String should = headers.firstValue("x-should-retry").orElse("");
        if (should.equals("false") || (!should.equals("true") && !RETRYABLE.contains(status))) {
            return Optional.empty();
        }
        Optional<Duration> asked = retryAfter(headers, now);
        if (asked.isEmpty()) {
            return Optional.of(backoff(attempt, random));
        }
        // A tenth more at random, so that callers turned away together do not come back together.
        return asked.filter(wait -> wait.compareTo(MAX_RETRY_AFTER) <= 0)
                .map(wait -> wait.plusNanos((long) (wait.toNanos() * 0.1 * random.getAsDouble())));
    }

    /** Whether a failure without an error status is one to try again, as long as nothing of the answer has come. */
    static boolean mayRetry(LlamarackException failure) {
        if (failure instanceof StreamErrorException) {
            return ((StreamErrorException) failure).code().filter(RETRYABLE_CODES::contains).isPresent();
        }
        if (failure instanceof CallTimeoutException) {
            return ((CallTimeoutException) failure).phase() == CallTimeoutException.Phase.CONNECT;
        }
        return failure instanceof TransportException;
    }

    /** Full jitter: anywhere from nothing to 0.5 s, 1 s, 2 s, 4 s, 8 s. */
    static Duration backoff(int attempt, DoubleSupplier random) {
        double ceiling = Math.min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * Math.pow(2, attempt));
        return seconds(ceiling * random.getAsDouble());
    }

    /** What the server asks for: milliseconds first, then seconds or a date; empty when it says nothing usable. */
    static Optional<Duration> retryAfter(HttpHeaders headers, Instant now) {
        Optional<Duration> exact = headers.firstValue("retry-after-ms").flatMap(text -> number(text, 0.001));
        return exact.isPresent() ? exact : headers.firstValue("retry-after").flatMap(text -> {
            Optional<Duration> number = number(text, 1);
            return number.isPresent() ? number : date(text, now);
        });
    }

    private static Optional<Duration> number(String text, double secondsPerUnit) {
        try {
            double value = Double.parseDouble(text.trim()) * secondsPerUnit;
            // A day bounds the arithmetic; anything above is over the limit in any case.
            return value >= 0 ? Optional.of(seconds(Math.min(value, 86_400))) : Optional.empty();
        } catch (NumberFormatException notANumber) {
            return Optional.empty();
        }
    }

    private static Optional<Duration> date(String text, Instant now) {
        try {
            Instant at = ZonedDateTime.parse(text.trim(), DateTimeFormatter.RFC_1123_DATE_TIME).toInstant();
            return Optional.of(at.isBefore(now) ? Duration.ZERO : Duration.between(now, at));
        } catch (DateTimeException notADate) {
            return Optional.empty();
        }
    }

    private static Duration seconds(double value) {
        return Duration.ofNanos((long) (value * 1e9));
    }
}
