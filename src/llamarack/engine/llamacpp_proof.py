"""Proves that a llama-server computes: it answers on a model of noise as the built-in library does. Starts processes.

A build can start and still be wrong: GCC 12 loses the configuration of AMX tiles, and the first batch ends the process.
So one batch and a few single steps are run on every kind of matrix, and the log-probabilities are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any

from llamarack.engine.llamacpp_binary import PROGRAM, ask_binary
from llamarack.engine.llamacpp_log import instruction_sets
from llamarack.engine.llamacpp_options import ServerOptions, binary_arguments, worker_parameters
from llamarack.engine.probe_model import write_probe_model
from llamarack.errors import StartFailed

_WORKER = Path(__file__).with_name("llamacpp_worker.py")
_START_TIMEOUT_S = 120.0
_POLL_S = 0.05
_PROMPT = "".join(chr(ord("a") + (7 * number) % 26) for number in range(160))  # longer than any tile or block
_STEPS = 6
# Kernels of other widths round differently: 0.002 seen between AVX2 builds of two versions; a lost tile is far off.
_TOLERANCE_LOGPROB = 0.1
_KEY = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """`largest_difference`: of the log-probability of any token that both rank among the likeliest."""

    instruction_sets: tuple[str, ...]
    largest_difference: float


class Miscomputed(StartFailed):
    """A build that crashes or answers wrongly where the built-in library answers well."""

    code = "engine_miscomputes"


def prove(binary: Path, *, on_cards: bool, threads: int) -> Proof:
    """Raises Miscomputed, StartFailed."""
    with tempfile.TemporaryDirectory(prefix="llamarack-probe-") as name:
        folder = Path(name)
        model = write_probe_model(folder / "probe.gguf")
        reference, _ = _answers(_worker(_options(model, folder, "r", threads, on_cards=False), folder), folder, "r")
        options = _options(model, folder, "c", threads, on_cards=on_cards)
        asked = ask_binary(binary)
        arguments = binary_arguments(options, asked.flags, program=asked.shown, template_file=None)
        found, log = _answers([str(binary), *arguments], folder, "c")
    return Proof(instruction_sets=instruction_sets(log), largest_difference=_compare(reference, found))


def _options(model: Path, folder: Path, name: str, threads: int, *, on_cards: bool) -> ServerOptions:
    return ServerOptions(
        model_path=model,
        name="probe",
        socket=folder / f"{name}.sock",
        pool_tokens=512,
        sequences=1,
        batch_tokens=256,
        micro_batch_tokens=256,
        kv_dtype="f16",
        kv_unified=False,
        threads=threads,
        gpu_layers=999 if on_cards else 0,
        devices_named=on_cards,
        split_mode="none",
        main_gpu=0,
        tensor_split=None,
        rpc_servers=(),
        template=None,
    )


def _worker(options: ServerOptions, folder: Path) -> list[str]:
    path = folder / "reference.json"
    path.write_text(json.dumps(worker_parameters(options, {})))
    return [sys.executable, "-P", str(_WORKER), str(path)]


def _answers(command: Sequence[str], folder: Path, name: str) -> tuple[list[dict[str, float]], list[str]]:
    """The likeliest tokens of each step with their log-probabilities, and the log."""
    log = folder / f"{name}.log"
    environment = {**os.environ, "LLAMA_API_KEY": _KEY, "LLAMARACK_ENGINE_KEY": _KEY}
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        answer = _ask(process, folder / f"{name}.sock", log)
    finally:
        process.kill()
        process.wait()
    content = answer["choices"][0]["logprobs"]["content"]
    steps = [{top["token"]: float(top["logprob"]) for top in one["top_logprobs"]} for one in content]
    return steps, log.read_text(errors="replace").splitlines()


def _ask(process: subprocess.Popen[bytes], path: Path, log: Path) -> dict[str, Any]:
    body = {"prompt": _PROMPT, "max_tokens": _STEPS, "temperature": 0, "logprobs": 8, "ignore_eos": True}
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, HTTPException, ValueError):
            status, answer = _request(path, body)
            if status == 200:
                return answer
            if status != 503:  # 503: loading
                raise StartFailed(f"{PROGRAM} answers {status}: {answer}", hint=f"read {log}")
        time.sleep(_POLL_S)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    if process.poll() is None:
        raise StartFailed(f"{PROGRAM} did not answer within {_START_TIMEOUT_S:.0f} s: {last}")
    code = process.returncode
    if code in (-signal.SIGSEGV, -signal.SIGILL, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE):
        raise Miscomputed(f"{PROGRAM} ended with {signal.Signals(-code).name} in its first batch: {last}")
    raise StartFailed(f"{PROGRAM} ended with exit code {code}: {last}")


class _Connection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=_START_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(_START_TIMEOUT_S)
        self.sock.connect(str(self._path))


def _request(path: Path, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    with contextlib.closing(_Connection(path)) as connection:
        headers = {"Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def _compare(reference: Sequence[dict[str, float]], found: Sequence[dict[str, float]]) -> float:
    """Raises Miscomputed. Texts may part at a tie; up to there every likely token has to agree."""
    largest = 0.0
    for expected, given in zip(reference, found, strict=True):
        shared = expected.keys() & given.keys()
        differences = [abs(expected[token] - given[token]) for token in shared]
        if len(shared) < len(expected) // 2 or max(differences) > _TOLERANCE_LOGPROB:
            worst = max(differences, default=float("inf"))
            raise Miscomputed(
                f"{PROGRAM} computes other probabilities than the built-in library: {worst:.3f} apart, "
                f"{_TOLERANCE_LOGPROB} allowed, {len(shared)} of {len(expected)} likeliest tokens shared"
            )
        largest = max(largest, *differences)
        if max(expected, key=expected.__getitem__) != max(given, key=given.__getitem__):
            break
    return largest
