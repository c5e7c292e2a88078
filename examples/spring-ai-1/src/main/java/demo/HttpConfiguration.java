// Not run: the artifacts of this example were not reachable where it was written; not compiled either. Written from the library's published documentation.
package demo;

import java.net.http.HttpClient;
import java.time.Duration;
import org.springframework.boot.web.client.RestClientCustomizer;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.http.client.BufferingClientHttpRequestFactory;
import org.springframework.http.client.JdkClientHttpRequestFactory;

/**
 * Calls without a stream: HTTP/1.1 without an h2c offer, 10 s to connect, 300 s to the answer, and a body with a
 * length (the request is buffered) instead of a chunked one. The rack takes all of these; other servers may not.
 */
@Configuration
class HttpConfiguration {
    @Bean
    RestClientCustomizer rackRestClient() {
        HttpClient http = HttpClient.newBuilder()
                .version(HttpClient.Version.HTTP_1_1)
                .connectTimeout(Duration.ofSeconds(10))
                .build();
        JdkClientHttpRequestFactory factory = new JdkClientHttpRequestFactory(http);
        factory.setReadTimeout(Duration.ofSeconds(300));
        return builder -> builder.requestFactory(new BufferingClientHttpRequestFactory(factory));
    }
}
