package io.llamarack.client;

import java.net.URI;

/** The two roots of a server: {@code http://host/v1} for the API, {@code http://host} for health and tokens. */
final class Endpoint {
    private final String root;

    private Endpoint(String root) {
        this.root = root;
    }

    static Endpoint of(String url) {
        String text = url == null ? "" : url.strip().replaceAll("/+$", "");
        if (text.endsWith("/v1")) {
            text = text.substring(0, text.length() - "/v1".length()).replaceAll("/+$", "");
        }
        if (!text.matches("https?://[^/?#]+[^?#]*")) {
            throw new IllegalArgumentException(
                    "`baseUrl` must be an http or https URL such as http://127.0.0.1:8080; given " + url);
        }
        return new Endpoint(text);
    }

    URI api(String path) {
        return URI.create(root + "/v1" + path);
    }

    URI server(String path) {
        return URI.create(root + path);
    }

    boolean isTls() {
        return root.startsWith("https:");
    }
}
