// Run against `llamarack serve` (llama.cpp on the CPU, SmolLM2-135M-Instruct Q4_1), with OkHttp 3.13.1 on JDK 17.0.15,
// compiled with --release 8; not run on a JDK 8.
// JDK 8 has no java.net.http; OkHttp 3.12+ runs on it. Settings that matter: readTimeout is the longest gap
// between two reads and 10 s by default, too short for a queue or a long prompt without heartbeats; callTimeout
// covers the whole answer, so it stays off; HTTP/1.1 is what OkHttp speaks on http URLs; call.cancel(), or
// closing the response, stops the generation.
//   javac --release 8 -cp okhttp.jar:okio.jar -d build OkHttpChat.java
//   LLAMARACK_URL=http://127.0.0.1:8080 MODEL=llama2-13b-chat java -cp build:okhttp.jar:okio.jar OkHttpChat "Say hello"

import java.io.IOException;
import java.util.concurrent.TimeUnit;
import okhttp3.MediaType;
import okhttp3.OkHttpClient;
import okhttp3.Request;
import okhttp3.RequestBody;
import okhttp3.Response;
import okio.BufferedSource;

public class OkHttpChat {
    public static void main(String[] arguments) throws IOException {
        String url = System.getenv("LLAMARACK_URL");
        String prompt = arguments.length > 0 ? arguments[0] : "Say hello";
        String json = "{\"model\":\"" + System.getenv("MODEL") + "\",\"stream\":true,\"max_tokens\":32,"
                + "\"messages\":[{\"role\":\"user\",\"content\":\"" + escaped(prompt) + "\"}]}";
        OkHttpClient http = new OkHttpClient.Builder()
                .connectTimeout(10, TimeUnit.SECONDS)
                .readTimeout(300, TimeUnit.SECONDS)
                .callTimeout(0, TimeUnit.SECONDS)
                .build();
        Request.Builder request = new Request.Builder()
                .url(url + "/v1/chat/completions")
                .header("Accept", "text/event-stream")
                .post(RequestBody.create(MediaType.parse("application/json"), json.getBytes("UTF-8")));
        if (System.getenv("LLAMARACK_API_KEY") != null) {
            request.header("Authorization", "Bearer " + System.getenv("LLAMARACK_API_KEY"));
        }
        boolean done = false;
        try (Response response = http.newCall(request.build()).execute()) {
            if (!response.isSuccessful()) {
                System.err.println(response.code() + " " + response.body().string());
                System.exit(1);
            }
            BufferedSource source = response.body().source();
            // readUtf8Line: UTF-8 whatever the platform's charset is, and never half a character.
            String line = "";
            while (!done && (line = source.readUtf8Line()) != null) {
                if (line.equals("data: [DONE]")) {
                    done = true;
                } else if (line.startsWith("data: ")) {
                    System.out.println(line.substring("data: ".length()));
                }
            }
        } finally {
            http.dispatcher().executorService().shutdown();
            http.connectionPool().evictAll();
        }
        if (!done) {
            System.err.println("the stream broke off");
            System.exit(1);
        }
    }

    private static String escaped(String text) {
        StringBuilder json = new StringBuilder();
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                json.append('\\').append(c);
            } else if (c < 0x20) {
                json.append(String.format("\\u%04x", (int) c));
            } else {
                json.append(c);
            }
        }
        return json.toString();
    }
}
