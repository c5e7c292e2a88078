"""How strict clients read a stream: the rules of seven parsers, written anew from their documented behaviour.

Each takes the body's bytes and gives the text of choice 0, or raises ParserBroke where the client would throw or hang.
A gateway whose streams all of them read alike needs no settings per client.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

FINISH_REASONS = {"stop", "length", "content_filter", "tool_calls", None}
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class ParserBroke(Exception):
    """The client throws, hangs or loses something here."""


@dataclass
class Read:
    """What the application got. `error`: the message it was shown."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None
    tool_ids: list[str] = field(default_factory=list)
    tool_arguments: str = ""

    def take(self, chunk: dict[str, Any]) -> None:
        """Choice 0 of a chunk, with the closed enums of Spring AI 1.x and LangChain4j."""
        for choice in chunk["choices"]:
            if choice["finish_reason"] not in FINISH_REASONS:
                raise ParserBroke(f"finish_reason {choice['finish_reason']!r}")
            if choice["index"] != 0:
                continue
            delta = choice.get("delta", {"content": choice.get("text")})
            if "role" in delta and delta["role"] not in ROLES:
                raise ParserBroke(f"role {delta['role']!r}")
            self.text += delta.get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self._take_tools(delta.get("tool_calls"))
        self.usage = chunk.get("usage") or self.usage

    def _take_tools(self, calls: Any) -> None:
        if calls is None:
            return
        if len(calls) != 1:  # Spring AI 1.x: more than one a delta; an empty list misleads others
            raise ParserBroke(f"{len(calls)} tool calls in one delta")
        call = calls[0]
        if call.get("type", "function") != "function":
            raise ParserBroke(f"tool type {call['type']!r}")
        if "id" in call:  # LangChain4j joins the ids of all deltas
            self.tool_ids.append(call["id"])
        if not isinstance(call["function"]["arguments"], str):
            raise ParserBroke("arguments are no string")
        self.tool_arguments += call["function"]["arguments"]


def _json(text: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ParserBroke(f"not JSON: {text!r}") from error
    return value


def _lines(body: bytes) -> list[str]:
    """Lines without their ends; what follows the last end is lost, as with readers that wait for it."""
    return body.decode().replace("\r\n", "\n").split("\n")[:-1]


def openai_java(body: bytes) -> Read:
    """An error only from `event: error`; a chunk with usage loses its choices, and nothing may follow it."""
    read, event, ended = Read(), "", False
    for line in _lines(body):
        if line.startswith("event:"):
            event = line[6:].strip()
        elif line.startswith("data:"):
            data = line[5:].removeprefix(" ")
            if data.startswith("[DONE]"):
                break
            chunk = _json(data)
            if event == "error" or "error" in chunk:  # also `"error": null`
                read.error = str((chunk.get("error") or {}).get("message"))
                return read
            if ended:
                raise ParserBroke("a chunk after the final one")
            for name in ("id", "created", "model"):
                if name not in chunk:
                    raise ParserBroke(f"`{name}` is missing")
            if chunk.get("usage") is not None:
                if not {"prompt_tokens", "completion_tokens", "total_tokens"} <= set(chunk["usage"]):
                    raise ParserBroke("usage is incomplete")
                chunk, ended = {**chunk, "choices": []}, True
            read.take(chunk)
        elif not line:
            event = ""
    return read


def langchain4j(body: bytes) -> Read:
    """Blocks of lines; `event: error` is special, an error in plain data is not seen; exactly one choice."""
    read = Read()
    for block in "\n".join(_lines(body)).split("\n\n"):
        lines = block.split("\n")
        data = "\n".join(line[5:].removeprefix(" ") for line in lines if line.startswith("data:"))
        if "event: error" in lines:
            read.error = str(_json(data)["error"]["message"])
            return read
        if not data or data == "[DONE]":
            continue
        chunk = _json(data)
        if len(chunk.get("choices", [])) > 1:
            raise ParserBroke("several choices in a chunk")
        read.take({"choices": [], **chunk})
    return read


def simple_openai(body: bytes) -> Read:
    """Line pairs: a data line counts only with its space and a blank line after it; a named event hides its data."""
    read, lines, at = Read(), _lines(body), 0
    while at < len(lines):
        block = []
        while at < len(lines) and lines[at]:
            block.append(lines[at])
            at += 1
        at += 1
        if not block:
            raise ParserBroke("two blank lines in a row")
        if len(block) == 1 and block[0].startswith("data: ") and "[DONE]" not in block[0]:
            read.take(_json(block[0].replace("data: ", "")))
        elif len(block) > 1 and not block[0].startswith("event: error"):
            raise ParserBroke(f"a chunk is dropped: {block}")
    return read


def theokanning(body: bytes) -> Read:
    """Throws on any line that is neither data nor blank."""
    read, data = Read(), None
    for line in _lines(body):
        if line.startswith("data:"):
            data = line[5:].strip()
        elif not line and data is not None:
            if data == "[DONE]":
                break
            read.take(_json(data))
            data = None
        else:
            raise ParserBroke(f"SSEFormatException: {line!r}")
    return read


def azure(body: bytes) -> Read:
    """Refuses all but `data:` and `event:`, and several data lines in an event; stops at [DONE]."""
    read = Read()
    for block in body.decode().split("\n\n"):
        lines = block.split("\n")
        if sum(line.startswith("data:") for line in lines) > 1:
            raise ParserBroke("multi-line data is not supported")
        for line in filter(None, lines):
            if line.startswith("data:"):
                data = line[5:].strip()
                if data == "[DONE]":
                    return read
                chunk = _json(data)
                if "error" in chunk:
                    read.error = str(chunk["error"]["message"])
                    return read
                read.take(chunk)
            elif not line.startswith("event:"):
                raise ParserBroke(f"unexpected line {line!r}")
    return read


def okhttp_sse(body: bytes, content_type: str = "text/event-stream; charset=utf-8") -> Read:
    """Only its own type; the last event must end in a blank line."""
    if content_type.partition(";")[0].strip() != "text/event-stream":
        raise ParserBroke(f"type {content_type}")
    if not body.endswith(b"\n\n"):
        raise ParserBroke("the last event is lost")
    read = Read()
    for block in body.decode()[:-2].split("\n\n"):
        lines = block.split("\n")
        data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
        if not data or data == ["[DONE]"]:
            continue
        chunk = _json("\n".join(data))
        if "event: error" in lines:
            read.error = str(chunk["error"]["message"])
            return read
        read.take(chunk)
    return read


def spring_ai(body: bytes) -> Read:
    """Every chunk needs `id` and `model`; choices may be empty only beside usage; an index is a place in the list."""
    read = Read()
    for line in _lines(body):
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            continue
        chunk = _json(line[5:])
        if "error" in chunk:  # seen because of the event's name
            read.error = str(chunk["error"]["message"])
            return read
        if not chunk.get("id") or not chunk.get("model"):
            raise ParserBroke("id or model is missing")
        if not chunk["choices"] and chunk.get("usage") is None:
            raise ParserBroke("no choices")
        if [choice["index"] for choice in chunk["choices"]] != list(range(len(chunk["choices"]))):
            raise ParserBroke("a choice's index is not its place")
        read.take(chunk)
    return read


PARSERS = {
    "openai_java": openai_java,
    "langchain4j": langchain4j,
    "simple_openai": simple_openai,
    "theokanning": theokanning,
    "azure": azure,
    "okhttp_sse": okhttp_sse,
    "spring_ai": spring_ai,
}
# What does not read comments, several choices, or named events; as documented, whatever a gateway does.
NO_COMMENTS = {"theokanning", "azure"}
ONE_CHOICE = {"langchain4j"}
NO_ERROR_EVENT = {"theokanning", "simple_openai"}
