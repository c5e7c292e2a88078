// Not run: the artifacts of this example were not reachable where it was written; not compiled either. Written from the library's published documentation.
package demo;

import org.springframework.ai.chat.client.ChatClient;
import org.springframework.http.MediaType;
import org.springframework.web.bind.annotation.PostMapping;
import org.springframework.web.bind.annotation.RequestBody;
import org.springframework.web.bind.annotation.RestController;
import reactor.core.publisher.Flux;

/** POST a text to /ask for the whole answer, to /ask/stream for its pieces. A caller that leaves stops the generation. */
@RestController
class ChatController {
    private final ChatClient chat;

    ChatController(ChatClient.Builder builder) {
        this.chat = builder.build();
    }

    @PostMapping("/ask")
    String ask(@RequestBody String question) {
        return chat.prompt().user(question).call().content();
    }

    @PostMapping(path = "/ask/stream", produces = MediaType.TEXT_EVENT_STREAM_VALUE)
    Flux<String> stream(@RequestBody String question) {
        return chat.prompt().user(question).stream().content();
    }
}
