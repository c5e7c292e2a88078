// Run against `llamarack serve` (llama.cpp on the CPU, SmolLM2-135M-Instruct Q4_1), with JDK 17.0.15.
// Settings that matter: connectTimeout 10 s; HttpRequest.timeout covers the wait for the headers only (up to
// JDK 25; the whole body from JDK 26 on), and the rack sends headers when it admits the request; closing the
// stream of lines closes the connection and stops the generation; HTTP_1_1 saves an upgrade offer that the
// rack ignores. No JSON library: the text is escaped by hand, the answer printed as it comes.
//   LLAMARACK_URL=http://127.0.0.1:8080 MODEL=llama2-13b-chat java examples/plain-jdk/PlainJdkChat.java "Say hello"

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.stream.Collectors;
import java.util.stream.Stream;

public class PlainJdkChat {
    public static void main(String[] arguments) throws Exception {
        String url = System.getenv().getOrDefault("LLAMARACK_URL", "http://127.0.0.1:8080");
        String prompt = arguments.length > 0 ? arguments[0] : "Say hello";
        String body = "{\"model\":" + quoted(System.getenv("MODEL")) + ",\"stream\":true,\"max_tokens\":32,"
                + "\"messages\":[{\"role\":\"user\",\"content\":" + quoted(prompt) + "}]}";
        HttpClient http = HttpClient.newBuilder()
                .version(HttpClient.Version.HTTP_1_1)
                .connectTimeout(Duration.ofSeconds(10))
                .build();
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions"))
                .timeout(Duration.ofSeconds(300))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body));
        if (System.getenv("LLAMARACK_API_KEY") != null) {
            request.header("Authorization", "Bearer " + System.getenv("LLAMARACK_API_KEY"));
        }
        HttpResponse<Stream<String>> response = http.send(request.build(), HttpResponse.BodyHandlers.ofLines());
        try (Stream<String> lines = response.body()) {
            if (response.statusCode() != 200) {
                System.err.println(response.statusCode() + " " + lines.collect(Collectors.joining("\n")));
                System.exit(1);
            }
            boolean[] done = new boolean[1];
            lines.filter(line -> line.startsWith("data: ")).forEach(line -> {
                done[0] |= line.equals("data: [DONE]");
                System.out.println(line.substring("data: ".length()));
            });
            if (!done[0]) {
                System.err.println("the stream broke off");
                System.exit(1);
            }
        }
    }

    private static String quoted(String text) {
        StringBuilder json = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                json.append('\\').append(c);
            } else if (c < 0x20) {
                json.append(String.format("\\u%04x", (int) c));
            } else {
                json.append(c);
            }
        }
        return json.append('"').toString();
    }
}
