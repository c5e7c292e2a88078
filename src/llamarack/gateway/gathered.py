"""A whole answer put together from a stream, for engines that do not notice that the client of a whole one has left.

llama.cpp goes on to the last token of an answer whose connection is closed (measured with b11434 and xllamacpp
2026.10.11549: 400 tokens, 5 s); of a stream it makes none after the next. So plain requests are asked as streams there.
What is not plain (several choices, tools, log-probabilities, fields of the engine's own) goes as it came. No sockets.
"""

from __future__ import annotations

from typing import Any

import orjson

from llamarack.engine.dialect import Deviations
from llamarack.gateway import wire
from llamarack.gateway.body import Parsed
from llamarack.gateway.stream import MAX_EVENT_BYTES, EventTooLong, error_in, uncommented

_FEW_TOKENS = 16  # such an answer is over before it matters that its client left
_PLAIN = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("n_predict", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "presence_penalty"),
        *("frequency_penalty", "repeat_penalty", "repeat_last_n", "logit_bias", "ignore_eos", "n", "user"),
        *("response_format", "json_schema", "grammar", "cache_prompt", "prompt_cache_key", "metadata", "store"),
        "chat_template_kwargs",
    }
)
_ASKED = {"stream": True, "stream_options": {"include_usage": True}}
_OBJECTS = {"chat": "chat.completion", "text": "text_completion"}


def as_stream(body: bytes, parsed: Parsed) -> bytes | None:
    """The engine's body, asked as a stream; None where that would give another answer, or nothing is to be gained."""
    if parsed.shape not in _OBJECTS or parsed.stream or parsed.choices != 1:
        return None
    if any(name not in _PLAIN and value not in (None, False) for name, value in parsed.value.items()):
        return None
    if parsed.output_limit is not None and parsed.output_limit <= _FEW_TOKENS:
        return None
    if _ASKED.keys() & parsed.value.keys():
        return orjson.dumps({**orjson.loads(body), **_ASKED})
    start = body.index(b"{") + 1
    return body[:start] + orjson.dumps(_ASKED)[1:-1] + b"," + body[start:]


class Gathered:
    """Feeds on chunks as they come. `error`: the engine's own envelope, of an error inside the stream."""

    def __init__(self, deviations: Deviations, shape: str) -> None:
        self.error: dict[str, Any] | None = None
        self.done = False
        self._error_prefixes = deviations.error_prefixes
        self._is_chat = shape == "chat"
        self._about: dict[str, Any] = {}  # what all chunks say alike, the last word counts
        self._choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        self._texts: dict[str, list[str]] = {}
        self._rest = b""
        self._object = _OBJECTS[shape]

    def feed(self, chunk: bytes) -> bool:
        """True once it is over."""
        *events, self._rest = (self._rest + chunk).split(wire.EVENT_END)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong
        for event in events:
            self._take(event)
            if self.done or self.error is not None:
                return True
        return False

    def answer(self) -> bytes:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        choice = dict(self._choice)
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": "", **texts}
        else:
            choice |= {"text": "", **texts}
        return orjson.dumps({"choices": [choice], **self._about, "object": self._object})

    def _take(self, event: bytes) -> None:
        event = uncommented(event)
        self.error = error_in(event, self._error_prefixes)
        self.done = event.startswith(wire.DONE)
        if event and not self.done and self.error is None:
            chunk: dict[str, Any] = orjson.loads(event.removeprefix(b"data:"))
            for choice in chunk.pop("choices", ()):
                self._take_choice(choice)
            self._about |= chunk

    def _take_choice(self, choice: dict[str, Any]) -> None:
        said = choice.pop("delta", None) or {}
        if "text" in choice:
            said = {"text": choice.pop("text")}
        for name, text in said.items():
            if isinstance(text, str) and name != "role":
                self._texts.setdefault(name, []).append(text)
        self._choice |= {name: value for name, value in choice.items() if value is not None or name not in self._choice}
