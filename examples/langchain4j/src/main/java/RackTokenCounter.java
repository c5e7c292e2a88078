// Not run: the artifacts of this example were not reachable where it was written; not compiled either. Written from the library's published documentation.

import dev.langchain4j.data.message.AiMessage;
import dev.langchain4j.data.message.ChatMessage;
import dev.langchain4j.data.message.SystemMessage;
import dev.langchain4j.data.message.UserMessage;
import dev.langchain4j.model.TokenCountEstimator;
import io.llamarack.client.LlamarackClient;

/** Counts tokens with the served model's own tokenizer. LangChain4j's estimators know OpenAI's models only. */
final class RackTokenCounter implements TokenCountEstimator {
    /** The template puts a few tokens around each turn; Llama 2 puts at most 8 ([INST], [/INST], begin, end). */
    private static final int TOKENS_AROUND_A_TURN = 8;

    private final LlamarackClient rack;
    private final String model;

    RackTokenCounter(LlamarackClient rack, String model) {
        this.rack = rack;
        this.model = model;
    }

    @Override
    public int estimateTokenCountInText(String text) {
        return text.isEmpty() ? 0 : Math.toIntExact(rack.tokenize(model, text).count());
    }

    @Override
    public int estimateTokenCountInMessage(ChatMessage message) {
        return estimateTokenCountInText(text(message)) + TOKENS_AROUND_A_TURN;
    }

    @Override
    public int estimateTokenCountInMessages(Iterable<ChatMessage> messages) {
        int tokens = 0;
        for (ChatMessage message : messages) {
            tokens += estimateTokenCountInMessage(message);
        }
        return tokens;
    }

    private static String text(ChatMessage message) {
        if (message instanceof SystemMessage system) {
            return system.text();
        }
        if (message instanceof UserMessage user) {
            return user.singleText();
        }
        if (message instanceof AiMessage answer) {
            return answer.text() == null ? "" : answer.text();
        }
        return message.toString();
    }
}
