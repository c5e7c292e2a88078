// Run against `llamarack serve` (llama.cpp on the CPU, SmolLM2-135M-Instruct Q4_1), with JDK 17.0.15.
// The client of clients/java: limits, retries and truncated streams are its own affair; see docs/java.md.
//   clients/java/build-offline.sh package
//   LLAMARACK_URL=http://127.0.0.1:8080 java -cp "$(clients/java/build-offline.sh classpath)" \
//     examples/llamarack-client/ClientChat.java "Say hello"

import io.llamarack.client.ChatRequest;
import io.llamarack.client.ChatStream;
import io.llamarack.client.LlamarackClient;
import io.llamarack.client.LlamarackException;
import io.llamarack.client.Message;
import io.llamarack.client.StreamTruncatedException;
import io.llamarack.client.Usage;

public class ClientChat {
    public static void main(String[] arguments) {
        try (LlamarackClient client = LlamarackClient.fromEnv().build()) {
            String model = client.models().get(0).id();
            ChatRequest request = ChatRequest.builder()
                    .model(model)
                    .message(Message.user(arguments.length > 0 ? arguments[0] : "Say hello"))
                    .maxTokens(32)
                    .build();
            try (ChatStream stream = client.streamChat(request)) {
                stream.forEach(chunk -> System.out.print(chunk.text()));
                Usage usage = stream.result().usage().orElseThrow();
                System.out.printf("%n[%d prompt + %d output tokens]%n",
                        usage.promptTokens(), usage.completionTokens().orElseThrow());
            }
        } catch (StreamTruncatedException broken) {
            System.err.println("broke off after: " + broken.partialText());
            System.exit(1);
        } catch (LlamarackException failed) {
            System.err.println(failed.getMessage());
            System.exit(1);
        }
    }
}
