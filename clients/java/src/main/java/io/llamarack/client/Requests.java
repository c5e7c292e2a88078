package io.llamarack.client;

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Supplier;

/** What goes out: URLs, headers and bodies. */
final class Requests {
    private static final String USER_AGENT = "llamarack-java/" + version();

    private final Endpoint endpoint;
    private final Supplier<String> apiKey;
    private final boolean http2;
    private final JsonCodec codec;

    Requests(Endpoint endpoint, Supplier<String> apiKey, boolean http2, JsonCodec codec) {
        this.endpoint = endpoint;
        this.apiKey = apiKey;
        this.http2 = http2;
        this.codec = codec;
    }

    Endpoint endpoint() {
        return endpoint;
    }

    /** A request per attempt of one call; all carry the same key, so that a server can tell them from new work. */
    Supplier<HttpRequest.Builder> get(URI uri, CallInfo info, CallOptions options) {
        return () -> base(uri, info, options).setHeader("Accept", "application/json").GET();
    }

    Supplier<HttpRequest.Builder> post(
            URI uri, Map<String, Object> fields, boolean isStream, CallInfo info, CallOptions options) {
        byte[] body = encode(fields, isStream);
        return () -> {
            HttpRequest.Builder request = base(uri, info, options)
                    .setHeader("Content-Type", "application/json")
                    .setHeader("Accept", isStream ? "text/event-stream" : "application/json")
                    // An array has a length: no chunked body, which some servers read as empty.
                    .POST(HttpRequest.BodyPublishers.ofByteArray(body));
            return isStream ? request.setHeader("Accept-Encoding", "identity") : request;
        };
    }

    private HttpRequest.Builder base(URI uri, CallInfo info, CallOptions options) {
        HttpRequest.Builder request = HttpRequest.newBuilder(uri)
                .version(endpoint.isTls() && http2 ? HttpClient.Version.HTTP_2 : HttpClient.Version.HTTP_1_1)
                .setHeader("User-Agent", USER_AGENT)
                .setHeader("Idempotency-Key", info.idempotencyKey());
        String key = apiKey.get();
        if (key != null && !key.isEmpty()) {
            request.setHeader("Authorization", "Bearer " + key);
        }
        options.headers().forEach(request::setHeader);
        return request;
    }

    private byte[] encode(Map<String, Object> fields, boolean isStream) {
        Map<String, Object> body = new LinkedHashMap<>(fields);
        if (isStream) {
            body.put("stream", true);
            body.putIfAbsent("stream_options", Map.of("include_usage", true));
        } else {
            body.remove("stream");
            body.remove("stream_options");
        }
        try {
            return codec.write(body);
        } catch (Exception notJson) {
            throw new IllegalArgumentException(
                    "the request has a value that is no JSON value: " + notJson.getMessage(), notJson);
        }
    }

    private static String version() {
        String version = Requests.class.getPackage().getImplementationVersion();
        return version == null ? "unpackaged" : version;
    }
}
