"""A GGUF model inside the caller's own process, without HTTP.

    from llamarack import embed

    with embed.open("llama-2-7b-chat.Q8_0.gguf", contexts=4, context_tokens=4096) as model:
        print(model.chat([{"role": "user", "content": "Hello"}], max_tokens=64).text)
        for piece in model.stream_complete("Once upon a time", max_tokens=64):
            print(piece, end="")

The weights are loaded once, under the machine's load lock, and shared by all threads. Each request occupies one of a
fixed number of contexts; when all are busy it waits, with a deadline. `close()` (or the end of `with`) stops what runs
and gives the memory back; a model that is dropped unclosed warns and is counted as leaked.

- `loading`: open(): checks, the load lock, the library's parameters
- `model`: Model, its contexts and its end
- `request`: what goes into the library and what comes out
"""

from llamarack.embed.loading import open
from llamarack.embed.model import Counts, Model, counts
from llamarack.embed.request import Answer

__all__ = ["Answer", "Counts", "Model", "counts", "open"]
