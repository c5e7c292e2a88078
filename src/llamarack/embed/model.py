"""An open model: a fixed number of contexts, shared by threads, and an end that gives the memory back."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from llamarack.embed.request import Answer, Chunk, Kind, Request, content, engine_error
from llamarack.errors import BadRequest, DeadlineExceeded, EngineError, NotReady, Overloaded, UpstreamFailed
from llamarack.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Since the process started. `leaked`: dropped without close(); their memory came back at garbage collection."""

    opened: int
    open: int
    leaked: int


class _Counters:
    """Reentrant, since garbage collection may run a `__del__` inside a locked stretch of the same thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.opened = self.closed = self.leaked = 0

    def add(self, *, opened: int = 0, closed: int = 0, leaked: int = 0) -> None:
        with self.lock:
            self.opened += opened
            self.closed += closed
            self.leaked += leaked


_counters = _Counters()


def counts() -> Counts:
    with _counters.lock:
        open_now = _counters.opened - _counters.closed - _counters.leaked
        return Counts(opened=_counters.opened, open=open_now, leaked=_counters.leaked)


def _return_freed_memory() -> None:
    """glibc keeps freed memory in its arenas: after a closed tiny model 8 MB stayed resident without this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


class Model:
    """An open model; made by `open()`. All methods may be called from any thread, but not from a forked child."""

    def __init__(self, spec: ModelSpec, server: Any, contexts: int, context_tokens: int) -> None:
        self.spec = spec
        self.contexts = contexts
        self.context_tokens = context_tokens
        self._server = server
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._busy = 0
        self._closing = False
        _counters.add(opened=1)

    @property
    def is_open(self) -> bool:
        return self._server is not None and not self._closing

    @property
    def contexts_busy(self) -> int:
        return self._busy

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """`messages` as in OpenAI's API, rendered by the model's own template. Options as in `complete`."""
        return self._answer("chat", {"messages": list(messages)}, options)

    def complete(self, prompt: str, **options: Any) -> Answer:
        """`wait_s` (30): for a free context. `timeout_s` (600): for the whole answer. The others go to the engine:
        max_tokens, temperature, top_p, seed, stop, grammar, ...

        Raises Overloaded, DeadlineExceeded, ContextLengthExceeded, BadRequest, UpstreamFailed, NotReady (closed).
        """
        return self._answer("complete", {"prompt": prompt}, options)

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """Pieces of text as they come. Leaving the loop stops the engine and frees the context."""
        return self._stream("chat", {"messages": list(messages)}, options)

    def stream_complete(self, prompt: str, **options: Any) -> Iterator[str]:
        return self._stream("complete", {"prompt": prompt}, options)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stops running requests (they raise NotReady) and frees the memory. Does nothing when closed already.

        Raises EngineError where a request is still inside the library at the deadline: call it again.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._busy == 0, timeout_s):
                raise EngineError(
                    f"{self._busy} requests are still running after {timeout_s:g} s", hint="call close() again"
                )
            server, self._server = self._server, None
        if server is not None:
            del server  # the last reference: the library frees everything here
            _return_freed_memory()
            _counters.add(closed=1)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_server", None) is not None and self._pid == os.getpid():
            _counters.add(leaked=1)
            warnings.warn(
                f"embedded model {self.spec.path} was never closed: use `with`, or close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _answer(self, kind: Kind, request: dict[str, Any], options: dict[str, Any]) -> Answer:
        texts: list[str] = []
        last: dict[str, Any] = {}

        def take(chunk: Chunk) -> None:
            text, reason = content(chunk)
            texts.append(text)
            last.update({"reason": reason} if reason else {}, **{"usage": chunk["usage"]} if chunk.get("usage") else {})

        self._generate(kind, Request.of(request, options), take, threading.Event())
        usage = last.get("usage", {})
        return Answer(
            text="".join(texts),
            finish_reason=last.get("reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
        )

    def _stream(self, kind: Kind, request: dict[str, Any], options: dict[str, Any]) -> Iterator[str]:
        parsed = Request.of(request, options)  # bad options are refused here, not at the first piece
        return self._pieces(kind, parsed)

    def _pieces(self, kind: Kind, request: Request) -> Iterator[str]:
        """The library calls back from inside one call, so that call gets a thread and the pieces a queue."""
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        cancelled = threading.Event()

        def run() -> None:
            try:
                self._generate(kind, request, lambda chunk: pieces.put(content(chunk)[0]), cancelled)
                pieces.put(None)
            except BaseException as error:  # raised again in the caller's thread, below
                pieces.put(error)

        worker = threading.Thread(target=run, name="llamarack-embed-stream")
        worker.start()
        try:
            while (piece := pieces.get()) is not None:  # ends: _generate has deadlines, and run() always puts an end
                if isinstance(piece, BaseException):
                    try:
                        raise piece
                    finally:
                        del piece  # as in _generate
                if piece:
                    yield piece
        finally:
            cancelled.set()
            worker.join()

    def _generate(
        self, kind: Kind, request: Request, take: Callable[[Chunk], None], cancelled: threading.Event
    ) -> None:
        deadline_monotonic_s = time.monotonic() + request.timeout_s
        failure: list[BaseException] = []

        def on_chunk(chunk: Chunk) -> bool:
            """True stops the engine. The library swallows what is raised here, so failures are kept aside."""
            try:
                if cancelled.is_set() or not threading.main_thread().is_alive():
                    return True
                if self._closing:
                    raise NotReady("the model was closed while it answered")
                if time.monotonic() > deadline_monotonic_s:
                    raise DeadlineExceeded(f"the answer took over timeout_s={request.timeout_s:g}")
                if "error" in chunk:
                    raise engine_error(chunk["error"])
                take(chunk)
            except BaseException as error:
                failure.append(error)
            return bool(failure)

        server = self._acquire(request.wait_s)
        try:
            if kind == "chat":
                server.handle_chat_completions(request.body, on_chunk)
            else:
                server.handle_completions(request.body, on_chunk)
        except ValueError as error:  # how the library refuses a malformed body
            raise BadRequest(str(error), hint="see the fields of OpenAI's chat and completion requests") from error
        except RuntimeError as error:
            raise UpstreamFailed(f"llama.cpp: {error}") from error
        finally:
            del server  # a traceback that lives on must not keep the library's memory
            self._release()
        if failure:
            raise failure.pop()  # popped: an exception that its own frame holds is a cycle

    def _acquire(self, wait_s: float) -> Any:
        if os.getpid() != self._pid:
            raise EngineError("the model was opened before a fork", hint="call embed.open() in the child itself")
        with self._changed:
            if not self._changed.wait_for(lambda: self._closing or self._busy < self.contexts, wait_s):
                raise Overloaded(
                    f"all {self.contexts} contexts were busy for wait_s={wait_s:g}",
                    hint="open the model with more contexts, or wait longer",
                )
            if self._closing:
                raise NotReady("the model is closed", hint="open it again: embed.open()")
            self._busy += 1
            return self._server

    def _release(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()
