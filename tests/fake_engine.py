"""An OpenAI engine with faults to order, in a process of its own: llama.cpp's endpoints, hand-written.

`python -I fake_engine.py --socket PATH | --port N [--load-s 2 --crash-after 3 ...]`: each field of `Faults` is a flag.
A request can bring its own: `[[fault stall_after=2]]` anywhere in its body. `POST /fake/faults {..}` sets them for all
requests to come, `GET /fake/record` tells what was seen: bodies byte for byte, who left when, how many ran at once.
Standard library only and run with -I, so it starts in 0.12 s of one core and imports nothing of the project.
"""

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

KEY_VARIABLE = "LLAMARACK_ENGINE_KEY"
# Words that vary (LiteLLM cuts repeated ones) and hold two, three and four byte characters.
TOKENS = (
    " The", " harbour", " café", " opens", " at", " seven", ",", " 早上好", ",", " and", " boats", " 🙂", " leave",
    " for", " Zürich", " with", " grain", " while", " gulls", " circle", " above", " old", " cranes", "; ", "北京",
    " rain", " falls", " on", " every", " second", " roof", ".",
)  # fmt: skip
GARBAGE = ("\ufffd", "\x00", "\x01", "\ufffd")
_DIRECTIVE = re.compile(rb"\[\[fault ([^\]]*)\]\]")
_FOREVER_S = 3600.0


@dataclass
class Faults:
    """Seconds, tokens and MiB; None or False: sound. Those before `spare_requests` concern the process."""

    load_s: float = 0.0  # /health says 503 meanwhile
    load_busy: bool = False  # prints meanwhile
    never_ready: bool = False
    crash_in_load: bool = False  # after load_s
    load_error: str = "error loading model: the fake engine was told to die"  # its last log line then
    ignore_sigterm: bool = False
    grandchild: bool = False  # a child that ignores SIGTERM
    grandchild_setsid: bool = False  # one in a session of its own
    metrics_lie: str = ""  # frozen (no token progress) | busy (one request always runs) | absent (404) | nan
    stall_small: bool = False  # /tokenize and its like never answer
    spare_requests: int = 0  # the first N requests meet none of the faults below: warm-up on the CPU makes 2
    header_delay_s: float = 0.0
    prefill_s: float = 0.0
    stall_prefill: bool = False
    refuse: int = 0  # HTTP status
    refuse_body: str = '{"error":{"code":500,"message":"told to refuse","type":"server_error"}}'
    token_interval_s: float = 0.0
    tokens_per_chunk: int = 1
    crash_after: int | None = None  # tokens of this request
    crash_with: str = "1"  # exit code, or a signal's name
    stall_after: int | None = None
    close_after: int | None = None  # FIN without the end of the chunked body
    reset_after: int | None = None  # RST
    error_after: int | None = None
    error_form: str = "data"  # data: {"error":..} | error: {..}
    error_message: str = "told to fail"
    no_done: bool = False  # a clean end of the body, but no [DONE]
    usage_with_finish: bool = False  # usage in the chunk that has the finish reason
    garbage: bool = False
    garbage_requests: int = 0  # only the first N
    split_utf8: bool = False  # writes part in the middle of a character
    byte_at_a_time: bool = False
    pings: bool = False  # an SSE comment before every event
    leak_mib: float = 0.0  # per request
    needs_grandchild: bool = False  # makes no tokens once one is dead
    hang_engine: bool = False  # from this request on no request gets a token; /health and /metrics answer
    memory: int = 0  # what it has, in units of its own: model file in bytes + 100 x batch + slots x context need it
    memory_ends: str = "start"  # start | request (the first) | load (two at once): when too little of it is met;
    # answer: told in the log, and lived on
    memory_signal: str = ""  # dies by this signal then, without a word

    def with_words(self, words: dict[str, Any]) -> "Faults":
        """A copy changed by name; text is turned into the field's type."""
        kinds = {f.name: str(f.type) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: _typed(kinds[name], value) for name, value in words.items()})


def _typed(kind: str, value: Any) -> Any:
    if not isinstance(value, str) or "str" in kind:
        return value
    if "bool" in kind:
        return value.lower() not in {"0", "false", "no"}
    return float(value) if "float" in kind else int(value)


@dataclass
class Seen:
    """One request as the engine saw it. `phase`: how far it came; `outcome`: how it ended, None while it runs."""

    method: str
    path: str
    headers: dict[str, str]
    body_base64: str
    arrived_monotonic_s: float
    phase: str = "arrived"  # arrived | waiting | prefill | decode
    tokens: int = 0
    outcome: str | None = None  # done | refused | left | closed
    ended_monotonic_s: float | None = None


@dataclass
class Engine:
    model: str
    slots: int
    context_tokens: int
    answer_tokens: int
    flavor: str
    key: str | None
    faults: Faults
    loaded: bool = False
    running: int = 0
    max_running: int = 0
    waiting: int = 0
    generating: int = 0  # requests for tokens so far
    kv_tokens: int = 0  # of a cache that all sequences share; 0: each has its own
    kv_used: int = 0
    max_kv_used: int = 0
    preemptions: int = 0  # how often a token found the cache full
    generated_tokens: int = 0
    prompt_tokens: int = 0
    hung: bool = False
    steps: int = 0  # of the model: tokens made and pieces of prompts read
    connections: int = 0
    grandchildren: list[int] = field(default_factory=list)
    leaked: list[bytearray] = field(default_factory=list)
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=20000))
    needs: int = 0  # memory, see Faults.memory
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def hold(self, tokens: int) -> None:
        """In the shared cache."""
        self.kv_used += tokens
        self.max_kv_used = max(self.max_kv_used, self.kv_used)
        if self.kv_tokens and tokens > 0 and self.kv_used > self.kv_tokens:
            self.preemptions += 1

    def record(self) -> dict[str, Any]:
        names = ("running", "max_running", "waiting", "generating", "generated_tokens", "connections", "grandchildren")
        counts = {name: getattr(self, name) for name in (*names, "max_kv_used", "preemptions")}
        requests = [dataclasses.asdict(each) for each in self.seen if not each.path.startswith("/fake")]
        return {"pid": os.getpid(), **counts, "requests": requests}


# What a body of another shape raises where it is read.
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


class Left(Exception):
    """The client closed the connection."""


class Closed(Exception):
    """The connection ends here, as ordered."""


class Connection:
    """One client. Bytes that come while an answer is made are kept for the next request; the end of them is seen."""

    def __init__(self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self.reader = reader
        self.writer = writer
        self.rest = b""

    async def serve(self) -> None:
        self.engine.connections += 1
        try:
            while (request := await self._read_request()) is not None:
                await self._answer_watched(request)
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (Left, Closed, ConnectionError):
            pass
        finally:
            self.engine.connections -= 1
            self.writer.close()

    async def _more(self) -> bool:
        data = await self.reader.read(65536)
        self.rest += data
        return bool(data)

    async def _read_request(self) -> Seen | None:
        while b"\r\n\r\n" not in self.rest:
            if not await self._more():
                return None
        head, self.rest = self.rest.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._read_chunks()
        else:
            body = await self._read_exactly(int(headers.get("content-length", "0")))
        seen = Seen(method, path, headers, base64.b64encode(body).decode(), time.monotonic())
        self.engine.seen.append(seen)
        return seen

    async def _read_exactly(self, length: int) -> bytes:
        while len(self.rest) < length:
            if not await self._more():
                raise Left
        body, self.rest = self.rest[:length], self.rest[length:]
        return body

    async def _read_chunks(self) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in self.rest:
                if not await self._more():
                    raise Left
            size, self.rest = self.rest.split(b"\r\n", 1)
            piece = await self._read_exactly(int(size.partition(b";")[0], 16) + 2)
            if len(piece) == 2:
                return body
            body += piece[:-2]

    async def _answer_watched(self, seen: Seen) -> None:
        """The answer, given up the moment the client is gone."""
        answering = asyncio.create_task(self._answer_or_refuse(seen))
        try:
            while not answering.done():
                watching = asyncio.create_task(self._more())
                await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and not watching.result():
                    raise Left
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
            answering.result()
            seen.outcome = seen.outcome or "done"
        except (Left, ConnectionError):
            seen.outcome = "left"
            raise Left from None
        except Closed:
            seen.outcome = "closed"
            raise
        finally:
            seen.ended_monotonic_s = time.monotonic()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, Left, Closed, ConnectionError):
                await answering

    async def _answer_or_refuse(self, seen: Seen) -> None:
        try:
            await self._answer(seen)
        except UNREADABLE as error:
            await self.refuse(seen, 400, f"{type(error).__name__}: {error}", "invalid_request_error")

    async def _answer(self, seen: Seen) -> None:
        engine, path = self.engine, seen.path.partition("?")[0].removeprefix("/v1")
        body = base64.b64decode(seen.body_base64)
        if path == "/health":
            ready = {"status": "ok"}
            loading = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
            return await self.send(200 if engine.loaded else 503, ready if engine.loaded else loading)
        if path == "/fake/record":
            return await self.send(200, engine.record())
        if path == "/fake/faults":
            engine.faults = engine.faults.with_words(json.loads(body))
            return await self.send(200, dataclasses.asdict(engine.faults))
        if engine.key is not None and seen.headers.get("authorization") != f"Bearer {engine.key}":
            return await self.refuse(seen, 401, "Invalid API Key", "authentication_error")
        if not engine.loaded:
            return await self.refuse(seen, 503, "Loading model", "unavailable_error")
        if path in {"/chat/completions", "/completions"}:
            return await Generation(self, seen, body, chat=path.startswith("/chat")).run()
        if path == "/metrics":
            if engine.faults.metrics_lie == "absent":
                return await self.refuse(seen, 404, "File Not Found", "not_found_error")
            return await self.send(200, metrics_text(engine).encode(), "text/plain; version=0.0.4")
        if engine.faults.stall_small:
            await asyncio.sleep(_FOREVER_S)
        answer = small_answer(engine, path, json.loads(body or b"{}"))
        if answer is None:
            return await self.refuse(seen, 404, "File Not Found", "not_found_error")
        return await self.send(200, answer)

    async def refuse(self, seen: Seen, status: int, message: str, kind: str) -> None:
        seen.outcome = "refused"
        await self.send(status, {"error": {"code": status, "message": message, "type": kind}})

    async def send(self, status: int, value: Any, kind: str = "application/json; charset=utf-8") -> None:
        body = value if isinstance(value, bytes) else dumps(value)
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()


class Generation:
    """One request for tokens, streamed or whole."""

    def __init__(self, connection: Connection, seen: Seen, body: bytes, *, chat: bool) -> None:
        self.connection, self.seen, self.body, self.chat = connection, seen, body, chat
        self.engine = connection.engine
        self.held = 0
        self.engine.generating += 1
        self.number = self.engine.generating
        spared = self.number <= self.engine.faults.spare_requests
        self.faults = Faults() if spared else self.engine.faults
        if (directive := _DIRECTIVE.search(body)) is not None:
            words = dict(word.partition("=")[::2] for word in directive[1].decode().split())
            self.faults = self.faults.with_words({name: value or "true" for name, value in words.items()})
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-fake{self.engine.generating}"
        self.created = int(time.time())

    async def run(self) -> None:
        engine, faults = self.engine, self.faults
        if faults.leak_mib:
            engine.leaked.append(bytearray(b"x" * int(faults.leak_mib * 1024**2)))
        if faults.refuse:
            self.seen.outcome = "refused"
            await self.connection.send(faults.refuse, faults.refuse_body.encode())
            return
        self._read()
        if self.prompt_count > engine.context_tokens:
            message = f"{self.prompt_count} tokens exceed the available context size ({engine.context_tokens} tokens)"
            await self.connection.refuse(self.seen, 400, message, "exceed_context_size_error")
            return
        self.seen.phase = "waiting"
        engine.waiting += 1
        try:
            await engine.free.acquire()
        finally:
            engine.waiting -= 1
        engine.running += 1
        engine.max_running = max(engine.max_running, engine.running)
        if faults.memory_ends == "answer" and engine.faults.memory and engine.needs > engine.faults.memory:
            print(f"decode: failed to allocate compute buffers of size {engine.needs}", file=sys.stderr, flush=True)
        if faults.memory_ends == "request" or (faults.memory_ends == "load" and engine.running > 1):
            run_out(engine)
        try:
            await asyncio.sleep(faults.header_delay_s)
            await (self._stream() if self.stream else self._whole())
        finally:
            engine.running -= 1
            engine.hold(-self.held)
            engine.free.release()

    def _read(self) -> None:
        """What the answer depends on. Raises one of UNREADABLE for a body that says something else."""
        value = json.loads(self.body)
        self.stream = bool(value.get("stream"))
        self.wants_usage = bool((value.get("stream_options") or {}).get("include_usage"))
        self.num_choices = int(value.get("n") or 1)
        self.tool = value["tools"][0]["function"]["name"] if value.get("tools") else None
        named = [value.get(name) for name in ("n_predict", "max_completion_tokens", "max_tokens")]
        self.limit = next((limit for limit in named if isinstance(limit, int) and limit >= 0), None)
        self.prompt_count = len(re.findall(rb"\S+", self.body))
        if not 1 <= self.num_choices <= 8:
            raise ValueError("n")

    async def _tokens(self) -> AsyncIterator[str]:
        """The answer a piece at a time, with what was ordered to happen after so many tokens."""
        engine, faults, seen = self.engine, self.faults, self.seen
        seen.phase = "prefill"
        self.held = self.prompt_count
        engine.hold(self.held)
        engine.hung |= faults.hang_engine or (engine.faults.needs_grandchild and not all_live(engine.grandchildren))
        if faults.stall_prefill or engine.hung:
            await asyncio.sleep(_FOREVER_S)
        ends = time.monotonic() + faults.prefill_s
        while (left_s := ends - time.monotonic()) > 0:
            await asyncio.sleep(min(0.05, left_s))
            engine.steps += 1
        engine.prompt_tokens += self.prompt_count  # read: real engines count a prompt with its first token
        wanted = engine.answer_tokens if self.limit is None else min(self.limit, engine.answer_tokens)
        source = GARBAGE if faults.garbage or self.number <= faults.garbage_requests else TOKENS
        piece = ""
        for number in range(wanted + 1):
            await self._happens(number)
            if number == wanted:
                break
            if number and (faults.token_interval_s or number % faults.tokens_per_chunk == 0):
                await asyncio.sleep(faults.token_interval_s)
            seen.phase = "decode"
            piece += source[(number + engine.generating) % len(source)]
            seen.tokens += 1
            engine.generated_tokens += 1
            self.held += 1
            engine.hold(1)
            engine.steps += 1
            if (number + 1) % faults.tokens_per_chunk == 0:
                yield piece
                piece = ""
        if piece:
            yield piece

    async def _happens(self, number: int) -> None:
        faults, writer = self.faults, self.connection.writer
        if number == faults.crash_after:
            await writer.drain()
            crash(faults.crash_with)
        if number == faults.stall_after:
            await asyncio.sleep(_FOREVER_S)
        if number == faults.close_after:
            raise Closed
        if number == faults.reset_after:
            connected = writer.get_extra_info("socket")
            if connected.family != socket.AF_UNIX:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            writer.transport.abort()
            raise Closed
        if number == faults.error_after:
            raise EngineFault

    def _finish_reason(self) -> str:
        if self.tool is not None:
            return "tool_calls"
        return "stop" if self.limit is None or self.limit > self.engine.answer_tokens else "length"

    def _usage(self) -> dict[str, int]:
        made, given = self.seen.tokens, self.prompt_count
        return {"completion_tokens": made, "prompt_tokens": given, "total_tokens": made + given}

    async def _whole(self) -> None:
        try:
            text = "".join([piece async for piece in self._tokens()])
        except EngineFault:
            await self.connection.refuse(self.seen, 500, self.faults.error_message, "server_error")
            return
        end = {"finish_reason": self._finish_reason()}
        if self.tool is not None:
            message = {"role": "assistant", "content": None, "tool_calls": [self._tool_call('{"city":"Zürich"}')]}
        else:
            message = {"role": "assistant", "content": text}
        choices: list[dict[str, Any]] = [
            {"index": i, **end, **({"message": message} if self.chat else {"text": text, "logprobs": None})}
            for i in range(self.num_choices)
        ]
        value = self._object("chat.completion" if self.chat else "text_completion", choices)
        await self.connection.send(200, {**value, "usage": self._usage()})

    def _tool_call(self, arguments: str) -> dict[str, Any]:
        call = {"name": self.tool, "arguments": arguments}
        return {"index": 0, "id": "call_1", "type": "function", "function": call}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices, "created": self.created, "id": self.id, "model": self.engine.model,
            "system_fingerprint": "fake", "object": kind,
        }  # fmt: skip

    async def _stream(self) -> None:
        self.connection.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        await self.connection.writer.drain()
        try:
            first = True
            async for piece in self._tokens():
                if first and self.chat:
                    await self._event(self._chunk({"role": "assistant", "content": None}))
                first = False
                if self.tool is not None:
                    await self._tool_events()
                    break
                await self._event(self._chunk({"content": piece} if self.chat else piece))
            await self._end()
        except EngineFault:
            error: Any = {"code": 500, "message": self.faults.error_message, "type": "server_error"}
            error = {"error": error} if self.faults.error_form == "data" else error
            await self._write(b"%s: %s\n\n" % (self.faults.error_form.encode(), dumps(error)))
        await self._write(b"")

    async def _tool_events(self) -> None:
        await self._event(self._chunk({"tool_calls": [self._tool_call("")]}))
        for part in ('{"city":', '"Zürich"}'):
            await self._event(self._chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}))

    async def _end(self) -> None:
        last = self._chunk({} if self.chat else "", self._finish_reason())
        if self.faults.usage_with_finish:
            await self._event({**last, "usage": self._usage()})
        else:
            await self._event(last)
            if self.wants_usage:
                await self._event({**self._chunk(None), "usage": self._usage(), "timings": {"predicted_ms": 1.5}})
        if not self.faults.no_done:
            await self._write(b"data: [DONE]\n\n")

    def _chunk(self, delta: dict[str, Any] | str | None, finish_reason: str | None = None) -> dict[str, Any]:
        part = {"delta": delta} if self.chat else {"text": delta, "logprobs": None}
        count = 0 if delta is None else self.num_choices
        choices = [{"finish_reason": finish_reason, "index": i, **part} for i in range(count)]
        return self._object("chat.completion.chunk" if self.chat else "text_completion", choices)

    async def _event(self, value: dict[str, Any]) -> None:
        ping = b": ping\n\n" if self.faults.pings else b""
        await self._write(ping + b"data: " + dumps(value) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        """One chunk of the body, in as many writes as ordered; empty data ends the body."""
        frame = b"%x\r\n%s\r\n" % (len(data), data)
        pieces = [frame]
        if self.faults.byte_at_a_time:
            pieces = [frame[i : i + 1] for i in range(len(frame))]
        elif self.faults.split_utf8 and (wide := re.search(rb"[\xc0-\xff]", frame)) is not None:
            pieces = [frame[: wide.start() + 1], frame[wide.start() + 1 :]]
        for piece in pieces:
            self.connection.writer.write(piece)
            await self.connection.writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0)


class EngineFault(Exception):
    """Generation fails with an error the engine still tells."""


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def crash(how: str) -> None:
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(5)
    os._exit(int(how))


def all_live(pids: list[int]) -> bool:
    with contextlib.suppress(ChildProcessError):
        return all(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid in pids)
    return False


def run_out(engine: Engine) -> None:
    """Ends as llama.cpp does where the plan it was started with needs more memory than there is."""
    if engine.faults.memory and engine.needs > engine.faults.memory:
        if not engine.faults.memory_signal:
            print(f"alloc_buffer: failed to allocate buffer of size {engine.needs}", file=sys.stderr, flush=True)
        crash(engine.faults.memory_signal or "1")


def small_answer(engine: Engine, path: str, value: dict[str, Any]) -> Any:
    """The endpoints without tokens to wait for; a token is a byte of UTF-8."""
    match path:
        case "/models":
            row = {"id": engine.model, "object": "model", "created": 1, "owned_by": "llamacpp"}
            return {"object": "list", "data": [row]}
        case "/tokenize":
            return {"tokens": ([1] if value.get("add_special") else []) + [3 + b for b in value["content"].encode()]}
        case "/detokenize":
            content = bytes(token - 3 for token in value["tokens"] if token >= 3).decode(errors="replace")
            return {"content": content}
        case "/apply-template":
            turns = (f"<|{turn['role']}|>{turn.get('content') or ''}" for turn in value["messages"])
            return {"prompt": "".join(turns) + "<|assistant|>"}
        case "/props":
            settings = {"n_ctx": engine.context_tokens}
            return {"total_slots": engine.slots, "default_generation_settings": settings, "model_path": "fake.gguf"}
        case "/slots":
            return [{"id": i, "is_processing": i < engine.running} for i in range(engine.slots)]
    return None


def metrics_text(engine: Engine) -> str:
    lie = engine.faults.metrics_lie
    generated = {"frozen": 0, "nan": "NaN"}.get(lie, engine.generated_tokens)
    running = max(1, engine.running) if lie == "busy" else engine.running
    if engine.flavor == "vllm":
        names = ("generation_tokens_total", "prompt_tokens_total", "num_requests_running", "num_requests_waiting")
        prefix, labels = "vllm:", f'{{engine="0",model_name="{engine.model}"}}'
    else:
        names = ("tokens_predicted_total", "prompt_tokens_total", "requests_processing", "requests_deferred")
        prefix, labels = "llamacpp:", ""
    text = ""
    prompt, steps = (0, 0) if lie == "frozen" else (engine.prompt_tokens, engine.steps)
    step_name = "iteration_tokens_total_count" if engine.flavor == "vllm" else "n_decode_total"
    values = (generated, prompt, running, engine.waiting, steps)
    for name, value in zip((*names, step_name), values, strict=True):
        kind = "counter" if name.endswith("_total") else "gauge"
        text += f"# HELP {prefix}{name} as the engine says\n# TYPE {prefix}{name} {kind}\n"
        text += f"{prefix}{name}{labels} {value}\n"
    if engine.kv_tokens:
        text += f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{engine.kv_tokens // 16}"}} 1.0\n'
        text += f"vllm:kv_cache_usage_perc{labels} {min(1.0, engine.kv_used / engine.kv_tokens)}\n"
        text += f"vllm:num_preemptions_total{labels} {engine.preemptions}\n"
    return text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context-tokens", type=int, default=100_000)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--model-path")
    parser.add_argument("--flavor", choices=("llamacpp", "vllm"), default="llamacpp")
    for each in dataclasses.fields(Faults):
        flag = "--" + each.name.replace("_", "-")
        if "bool" in str(each.type):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, default=each.default)
    return parser.parse_args()


def start_grandchildren(faults: Faults) -> list[int]:
    started = []
    for wanted, own_session in ((faults.grandchild, False), (faults.grandchild_setsid, True)):
        if not wanted:
            continue
        pid = os.fork()
        if pid == 0:
            if own_session:
                os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        print(f"worker: grandchild pid={pid}", flush=True)
        started.append(pid)
    return started


async def load(engine: Engine) -> None:
    ends = time.monotonic() + engine.faults.load_s
    while (left_s := ends - time.monotonic()) > 0:
        if engine.faults.load_busy:
            print(f"loads for another {left_s:.1f} s", flush=True)
        await asyncio.sleep(min(0.25, left_s))
    if engine.faults.memory_ends == "start":
        run_out(engine)
    if engine.faults.crash_in_load:
        print(engine.faults.load_error, file=sys.stderr, flush=True)
        crash(engine.faults.crash_with)
    engine.loaded = not engine.faults.never_ready


async def main() -> None:
    given = arguments()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faults = Faults().with_words({f.name: getattr(given, f.name) for f in dataclasses.fields(Faults)})
    if faults.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = Engine(
        given.model, given.slots, given.context_tokens, given.answer_tokens, given.flavor,
        os.environ.get(KEY_VARIABLE), faults, free=asyncio.Semaphore(given.slots),
        grandchildren=start_grandchildren(faults), kv_tokens=given.kv_tokens,
        needs=(os.path.getsize(given.model_path) if given.model_path else 0)
        + 100 * given.batch_tokens + given.slots * given.context_tokens,
    )  # fmt: skip
    if given.socket:
        server = await asyncio.start_unix_server(lambda *streams: Connection(engine, *streams).serve(), given.socket)
        print(f"worker: listening on {given.socket}", flush=True)
    else:
        server = await asyncio.start_server(
            lambda *streams: Connection(engine, *streams).serve(), "127.0.0.1", given.port or 0
        )
        print(f"worker: listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await load(engine)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
