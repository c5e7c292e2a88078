// Not run: the artifacts of this example were not reachable where it was written; not compiled either. Written from the library's published documentation.
// Settings that matter: baseUrl ends in /v1; the JDK client is told HTTP_1_1 (its default offers h2c, which the
// rack ignores and other servers do not survive); `timeout` is the wait for the headers up to JDK 25 and covers
// the whole stream from JDK 26 on; the memory holds what the model's context can: 4096 tokens less the answer.
//   LLAMARACK_URL=http://127.0.0.1:8080 MODEL=llama2-13b-chat mvn compile exec:java -Dexec.mainClass=LangChainDialogue

import dev.langchain4j.data.message.AiMessage;
import dev.langchain4j.data.message.SystemMessage;
import dev.langchain4j.data.message.UserMessage;
import dev.langchain4j.http.client.jdk.JdkHttpClient;
import dev.langchain4j.memory.ChatMemory;
import dev.langchain4j.memory.chat.TokenWindowChatMemory;
import dev.langchain4j.model.chat.ChatModel;
import dev.langchain4j.model.openai.OpenAiChatModel;
import io.llamarack.client.LlamarackClient;
import java.net.http.HttpClient;
import java.time.Duration;
import java.util.Scanner;

public class LangChainDialogue {
    private static final int CONTEXT_TOKENS = 4096;
    private static final int ANSWER_TOKENS = 512;

    public static void main(String[] arguments) {
        String url = System.getenv("LLAMARACK_URL");
        String model = System.getenv("MODEL");
        ChatModel chat = OpenAiChatModel.builder()
                .baseUrl(url + "/v1")
                .apiKey(System.getenv().getOrDefault("LLAMARACK_API_KEY", "none"))
                .modelName(model)
                .maxTokens(ANSWER_TOKENS)
                .timeout(Duration.ofSeconds(300))
                .maxRetries(2)
                .httpClientBuilder(JdkHttpClient.builder().httpClientBuilder(
                        HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1)))
                .build();
        try (LlamarackClient rack = LlamarackClient.fromEnv().build()) {
            ChatMemory memory = TokenWindowChatMemory.withMaxTokens(
                    CONTEXT_TOKENS - ANSWER_TOKENS, new RackTokenCounter(rack, model));
            memory.add(SystemMessage.from("You are a helpful assistant."));
            Scanner input = new Scanner(System.in);
            while (input.hasNextLine()) {
                memory.add(UserMessage.from(input.nextLine()));
                AiMessage answer = chat.chat(memory.messages()).aiMessage();
                memory.add(answer);
                System.out.println(answer.text());
            }
        }
    }
}
