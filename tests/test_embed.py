import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from llamarack import embed
from llamarack.embed.request import Request
from llamarack.errors import (
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    DoesNotFit,
    EngineError,
    ModelError,
    NeverReady,
    NotReady,
    Overloaded,
    StartFailed,
    UsageError,
)
from llamarack.hardware.loadlock import PATH_VARIABLE, LoadLock
from tests.huggingface_files import write_tiny_huggingface
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.llamacpp

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def _own_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATH_VARIABLE, str(tmp_path_factory.mktemp("lock") / "load.lock"))
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[embed.Model]:
    with embed.open(path, contexts=2, context_tokens=512, threads=1) as opened:
        yield opened


def test_chat_uses_the_models_template(model: embed.Model) -> None:
    answer = model.chat(HELLO, max_tokens=5, temperature=0)
    plain = model.complete("hello", max_tokens=5, temperature=0)
    assert answer.output_tokens == plain.output_tokens == 5
    assert answer.finish_reason == "length"
    assert answer.prompt_tokens is not None
    assert plain.prompt_tokens is not None
    # <bos>, <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n against <bos> hello, in this vocabulary
    assert answer.prompt_tokens > plain.prompt_tokens + 10


def test_stream_is_the_answer_in_pieces(model: embed.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "cache_prompt": False}
    pieces = list(model.stream_chat(HELLO, **options))
    assert len(pieces) > 1
    assert "".join(pieces) == model.chat(HELLO, **options).text
    assert "".join(model.stream_complete("hello", **options)) == model.complete("hello", **options).text


def test_many_threads_share_the_contexts(model: embed.Model) -> None:
    answers: list[embed.Answer] = []
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}  # random weights end an answer anywhere
    threads = [threading.Thread(target=lambda: answers.append(model.chat(HELLO, **options))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer.output_tokens for answer in answers] == [8] * 6
    assert model.contexts_busy == 0


def test_request_when_all_contexts_are_busy_ends_at_its_deadline(model: embed.Model) -> None:
    streams = [model.stream_complete("hello", **ENDLESS) for _ in range(model.contexts)]
    for stream in streams:
        next(stream)
    assert model.contexts_busy == model.contexts
    with pytest.raises(Overloaded, match="2 contexts were busy"):
        model.complete("hello", max_tokens=1, wait_s=0.01)
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    assert model.complete("hello", max_tokens=1, wait_s=10).output_tokens == 1


def test_leaving_a_stream_frees_its_context(model: embed.Model) -> None:
    for _ in model.stream_complete("hello", **ENDLESS):
        break
    gc.collect()
    assert model.contexts_busy == 0


def test_answer_past_its_deadline_is_stopped(model: embed.Model) -> None:
    with pytest.raises(DeadlineExceeded, match="timeout_s=0"):
        model.complete("hello", timeout_s=0, **ENDLESS)
    assert model.contexts_busy == 0


def test_prompt_longer_than_the_context_is_refused(model: embed.Model) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        model.complete("a" * 2000, max_tokens=1)
    assert "context_tokens" in str(caught.value.hint)
    with pytest.raises(ContextLengthExceeded):
        next(model.stream_complete("a" * 2000, max_tokens=1))


@pytest.mark.parametrize("options", [{"n": 2}, {"stream": True}, {"tools": []}, {"wait_s": None}, {"timeout_s": -1}])
def test_option_that_has_no_meaning_here_is_refused_at_once(model: embed.Model, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(options))):
        model.stream_complete("hello", **options)


def test_malformed_messages_are_the_callers_error(model: embed.Model) -> None:
    with pytest.raises(BadRequest):
        model.chat([{"role": "user"}])
    assert model.contexts_busy == 0


def test_open_model_can_be_reached_by_nobody_else(model: embed.Model) -> None:
    process = psutil.Process()
    assert [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []
    addresses = [c.laddr for c in process.net_connections("unix") if str(c.laddr).endswith("/s.sock")]
    assert addresses
    assert not any(os.path.exists(str(address)) for address in addresses)


def test_close_stops_a_running_stream_and_counts(path: Path) -> None:
    before = embed.counts()
    opened = embed.open(path, contexts=1, context_tokens=512, threads=1)
    assert embed.counts().open == before.open + 1
    stream = opened.stream_complete("hello", **ENDLESS)
    next(stream)
    opened.close()
    with pytest.raises(NotReady, match="closed"):
        list(stream)
    assert not opened.is_open
    opened.close()
    assert embed.counts() == embed.Counts(opened=before.opened + 1, open=before.open, leaked=before.leaked)
    with pytest.raises(NotReady, match="is closed"):
        opened.chat(HELLO)


def test_close_wakes_a_request_that_waits_for_a_context(path: Path) -> None:
    outcome: list[str] = []

    def ask() -> None:
        with pytest.raises(NotReady) as caught:
            opened.complete("hello", wait_s=60)
        outcome.append(caught.value.code)

    with embed.open(path, contexts=1, context_tokens=512, threads=1) as opened:
        stream = opened.stream_complete("hello", **ENDLESS)
        next(stream)
        waiter = threading.Thread(target=ask)
        waiter.start()
    waiter.join(30)
    assert outcome == ["model_not_ready"]


def test_model_dropped_unclosed_warns_and_is_counted(path: Path) -> None:
    before = embed.counts()
    opened = embed.open(path, contexts=1, context_tokens=256, threads=1)
    with pytest.warns(ResourceWarning, match=r"tiny\.gguf was never closed"):
        del opened
    gc.collect()
    assert embed.counts().leaked == before.leaked + 1
    assert embed.counts().open == before.open


def test_model_is_freed_at_once_after_errors_too(path: Path) -> None:
    """No cycle through a traceback: without the collector the last reference frees the model."""
    gc.disable()
    try:
        opened = embed.open(path, contexts=1, context_tokens=256, threads=1)
        with pytest.raises(ContextLengthExceeded):
            opened.complete("a" * 2000)
        with pytest.raises(ContextLengthExceeded):
            next(opened.stream_complete("a" * 2000))
        with pytest.warns(ResourceWarning, match="never closed"):
            del opened
    finally:
        gc.enable()


def test_cancelled_request_takes_no_further_piece(model: embed.Model) -> None:
    cancelled = threading.Event()
    taken: list[Any] = []

    def take(chunk: Any) -> None:
        taken.append(chunk)
        cancelled.set()

    model._generate("complete", Request.of({"prompt": "hello"}, dict(ENDLESS)), take, cancelled)
    assert len(taken) == 1


def test_error_that_is_kept_does_not_keep_the_memory(path: Path) -> None:
    opened = embed.open(path, contexts=1, context_tokens=256, threads=1)
    threads_open = len(os.listdir("/proc/self/task"))
    with pytest.raises(ContextLengthExceeded):
        opened.complete("a" * 2000)
    with pytest.raises(ContextLengthExceeded) as kept:
        list(opened.stream_complete("a" * 2000))
    opened.close()
    assert len(os.listdir("/proc/self/task")) < threads_open
    assert kept.value.code == "context_length_exceeded"


def test_load_waits_for_other_loads_on_the_machine(path: Path) -> None:
    with LoadLock(), pytest.raises(NeverReady, match="another model"):
        embed.open(path, load_timeout_s=0)
    lock = LoadLock()
    with embed.open(path, contexts=1, context_tokens=256, threads=1):
        assert lock.try_acquire()  # held while loading, not while open
    lock.release()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"contexts": 0}, UsageError),
        ({"contexts": 257}, UsageError),
        ({"context_tokens": 0}, UsageError),
        ({"contexts": 256, "context_tokens": 2**24}, DoesNotFit),
        ({"chat_template": "{% for %}"}, StartFailed),
    ],
)
def test_open_with_options_that_cannot_be_says_why(path: Path, options: dict[str, Any], error: type[Exception]) -> None:
    before = embed.counts()
    with pytest.raises(error) as caught:
        embed.open(path, **{"contexts": 1, "context_tokens": 256, "threads": 1, **options})
    assert getattr(caught.value, "hint", None)
    assert embed.counts() == before


def test_open_of_what_is_no_gguf_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        embed.open(tmp_path / "nothing.gguf")
    with pytest.raises(UsageError, match="only GGUF"):
        embed.open(write_tiny_huggingface(tmp_path / "hf"))


def test_model_in_a_forked_child_is_refused_instead_of_hanging(path: Path) -> None:
    program = (
        "import os, sys; from llamarack import embed; from llamarack.errors import EngineError\n"
        "model = embed.open(sys.argv[1], contexts=1, context_tokens=256, threads=1)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        model.complete('hello')\n"
        "    except EngineError:\n"
        "        os._exit(7)\n"
        "    os._exit(1)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "model.close()\n"
        "sys.exit(os.waitstatus_to_exitcode(status))\n"
    )
    assert subprocess.run([sys.executable, "-c", program, path], timeout=60).returncode == 7


def test_close_with_a_request_that_does_not_end_reports_it(path: Path) -> None:
    with embed.open(path, contexts=1, context_tokens=256, threads=1) as opened:
        opened._busy += 1  # a request inside the library that never comes back
        with pytest.raises(EngineError, match="1 requests are still running"):
            opened.close(timeout_s=0)
        opened._busy -= 1


def test_memory_is_flat_over_fifty_cycles() -> None:
    """`make proof-embed-cycles` runs 1000; its result is in benchmarks/results/embed-cycles.json."""
    root = Path(__file__).parents[1]
    program = (
        "import sys, json, pathlib, tempfile; sys.path.insert(0, 'benchmarks'); import embed_cycles as e\n"
        "from tests.tiny_model import write_tiny_llama\n"
        "folder = tempfile.mkdtemp()\n"
        "print(json.dumps(e.measure(write_tiny_llama(pathlib.Path(folder) / 'tiny.gguf'), 50)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, check=True, timeout=300)
    result = json.loads(done.stdout)
    closed = result["resident_closed_every_tenth_bytes"]
    assert closed[-1] - closed[1] < 4 * 1024**2
    assert result["counts"] == {"open": 0, "leaked": 0}
    assert result["threads_closed"]["last"] == result["threads_closed"]["cycle_10"]
    assert result["file_descriptors_closed"]["last"] == result["file_descriptors_closed"]["cycle_10"]
