"""A whole answer put together from a stream, for engines that do not notice that the client of a whole one has left.

llama.cpp goes on to the last token of an answer whose connection is closed (measured with b11434 and xllamacpp
2026.10.11549: 400 tokens, 5 s); of a stream it makes none after the next. So plain requests are asked as streams there,
those for several choices, with tools, or for log-probabilities of completions too: what comes out is what the engine's
own whole answer would be (tests/gateway/test_gathered_llamacpp.py), but that its usage counts all choices and not the
first alone. What has fields of the engine's own, or wants what its streams do not tell, goes as it came. No sockets.
"""

from __future__ import annotations

from typing import Any

import orjson

from llamarack.engine.dialect import Deviations
from llamarack.gateway import wire
from llamarack.gateway.body import Parsed
from llamarack.gateway.stream import MAX_EVENT_BYTES, EventTooLong, error_in, summed_usage, uncommented

_FEW_TOKENS = 16  # such an answer is over before it matters that its client left
_PLAIN = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("n_predict", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "presence_penalty"),
        *("frequency_penalty", "repeat_penalty", "repeat_last_n", "logit_bias", "ignore_eos", "n", "user"),
        *("response_format", "json_schema", "grammar", "cache_prompt", "prompt_cache_key", "metadata", "store"),
        *("tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs"),
        "chat_template_kwargs",
    }
)
_ASKED = {"stream": True, "stream_options": {"include_usage": True}}
_OBJECTS = {"chat": "chat.completion", "text": "text_completion"}


def as_stream(body: bytes, parsed: Parsed) -> bytes | None:
    """The engine's body, asked as a stream; None where that would give another answer, or nothing is to be gained."""
    if parsed.shape not in _OBJECTS or parsed.stream:
        return None
    if any(name not in _PLAIN and value not in (None, False) for name, value in parsed.value.items()):
        return None
    if parsed.output_limit is not None and parsed.output_limit <= _FEW_TOKENS:
        return None
    # A stream drops the probabilities of tokens that are no content (the last one's, a tool call's marks), and keeps
    # those of a stop text.
    if parsed.value.get("logprobs") not in (None, False) and (parsed.shape == "chat" or parsed.value.get("stop")):
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
        self._choices: dict[int, _Choice] = {}
        self._own_usage: dict[str, Any] | None = None  # from chunks of their own; else:
        self._beside_usage: dict[str, Any] | None = None  # from beside finish reasons
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
        choices = [choice.whole(is_chat=self._is_chat) for _, choice in sorted(self._choices.items())]
        usage = self._own_usage or self._beside_usage
        told = {} if usage is None else {"usage": usage}
        return orjson.dumps({"choices": choices, **self._about, **told, "object": self._object})

    def _take(self, event: bytes) -> None:
        event = uncommented(event)
        self.error = error_in(event, self._error_prefixes)
        self.done = event.startswith(wire.DONE)
        if not event or self.done or self.error is not None:
            return
        chunk = orjson.loads(event.removeprefix(b"data:"))
        if not isinstance(chunk, dict):  # llama.cpp begins a stream of several prompts with `null`
            return
        choices = chunk.pop("choices", None) or ()
        usage = chunk.pop("usage", None)
        for choice in choices:
            self._choices.setdefault(choice.get("index", 0), _Choice()).take(choice)
        if usage is not None and choices:
            self._beside_usage = summed_usage(self._beside_usage, usage)
        elif usage is not None:
            self._own_usage = summed_usage(self._own_usage, usage)
        self._about |= chunk


class _Choice:
    """One of an answer, from its parts."""

    def __init__(self) -> None:
        self._about: dict[str, Any] = {"index": 0, "finish_reason": None}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._probabilities: list[Any] = []

    def take(self, part: dict[str, Any]) -> None:
        said = part.pop("delta", None) or {}
        if "text" in part:
            said = {"text": part.pop("text")}
        for name, value in said.items():
            if isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
        for call in said.get("tool_calls") or ():
            self._take_call(call)
        probabilities = part.get("logprobs")
        if isinstance(probabilities, dict):
            del part["logprobs"]
            self._probabilities += probabilities.get("content") or ()
        self._about |= {name: value for name, value in part.items() if value is not None or name not in self._about}

    def _take_call(self, part: dict[str, Any]) -> None:
        """Its name and id come with the first part, its arguments in all."""
        part = dict(part)
        call = self._calls.setdefault(part.pop("index", 0), {"function": {"arguments": ""}})
        for name, value in (part.pop("function", None) or {}).items():
            function = call["function"]
            function[name] = function["arguments"] + value if name == "arguments" else value
        call |= part

    def whole(self, *, is_chat: bool) -> dict[str, Any]:
        texts: dict[str, Any] = {name: "".join(parts) for name, parts in self._texts.items()}
        choice = dict(self._about)
        if self._probabilities:
            choice["logprobs"] = {"content": self._probabilities}
        if not is_chat:
            return choice | {"text": "", **texts}
        if self._calls:
            texts["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        return choice | {"message": {"role": "assistant", "content": "", **texts}}
