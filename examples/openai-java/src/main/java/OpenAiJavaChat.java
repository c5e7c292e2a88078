// Not run: the artifacts of this example were not reachable where it was written; not compiled either. Written from the library's published documentation.
// Settings that matter: baseUrl ends in /v1; Timeout.request covers a whole call with its stream (10 min by
// default), Timeout.read the gap between two reads, which the rack's heartbeats (every 8 s) end; closing the
// StreamResponse stops the generation. The library retries twice, and the rack tells it when not to.
// A stream cut short without an error looks complete to this library: check the finish reason.
//   LLAMARACK_URL=http://127.0.0.1:8080 MODEL=llama2-13b-chat mvn compile exec:java -Dexec.mainClass=OpenAiJavaChat

import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.Timeout;
import com.openai.core.http.StreamResponse;
import com.openai.models.chat.completions.ChatCompletionChunk;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import java.time.Duration;

public class OpenAiJavaChat {
    public static void main(String[] arguments) {
        OpenAIClient client = OpenAIOkHttpClient.builder()
                .baseUrl(System.getenv("LLAMARACK_URL") + "/v1")
                .apiKey(System.getenv().getOrDefault("LLAMARACK_API_KEY", "none"))
                .timeout(Timeout.builder()
                        .connect(Duration.ofSeconds(10))
                        .read(Duration.ofSeconds(300))
                        .request(Duration.ofMinutes(30))
                        .build())
                .build();
        ChatCompletionCreateParams request = ChatCompletionCreateParams.builder()
                .model(System.getenv("MODEL"))
                .addUserMessage("Say hello")
                .maxCompletionTokens(32)
                .build();
        boolean[] finished = new boolean[1];
        try (StreamResponse<ChatCompletionChunk> stream =
                client.chat().completions().createStreaming(request)) {
            stream.stream().flatMap(chunk -> chunk.choices().stream()).forEach(choice -> {
                choice.delta().content().ifPresent(System.out::print);
                finished[0] |= choice.finishReason().isPresent();
            });
        }
        System.out.println();
        if (!finished[0]) {
            System.err.println("the stream broke off");
            System.exit(1);
        }
    }
}
