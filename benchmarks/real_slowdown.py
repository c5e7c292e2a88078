"""Does `compare` find a real slowdown, and does it leave equal runs alone? On a real engine, by the commands.

    python -m benchmarks.real_slowdown [MODEL.gguf] --rounds 8 --stopped 0.1 -o benchmarks/results/real_slowdown.json

One rack; in each round three runs of `bench`: BASE, the same AGAIN, and SLOW, during which the engine is halted for the
given part of every 40 ms (SIGSTOP, SIGCONT), as by a neighbour on its core. The order within a round turns, so that no
side always comes first. Then `compare BASE AGAIN` and `compare BASE SLOW` with the default gates of speed; both reports
stay in the folder beside the result. What the machine did meanwhile is in the intervals, and the result says what they
could have shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import describe_machine
from llamarack.judge.gates import load_gates
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir

_PERIOD_S = 0.04
_SIDES = ("base", "again", "slow")
_BENCH_TIMEOUT_S, _COMMAND_TIMEOUT_S = 300, 120
_RACK = "slowdown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--most-seconds", type=float, default=3600.0, help="no round is begun after so many")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--concurrency", default="1")
    parser.add_argument("--stopped", type=float, default=0.1, help="part of the time that SLOW is halted")
    parser.add_argument("--folder", type=Path, default=Path("build/real_slowdown"), help="new; runs and reports")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True)
    model = asked.model or demo_model(cache_dir(), print)
    file = _deployment(asked.folder, model)
    _llamarack("serve", str(file), "--detach", timeout_s=_COMMAND_TIMEOUT_S)
    try:
        rounds, halted = _rounds(asked, file, _engine_pid())
    finally:
        _llamarack("stop", "--rack", _RACK, timeout_s=_COMMAND_TIMEOUT_S)
    gates = _speed_gates(asked.folder)
    record = {
        "machine": describe_machine(),
        "rounds": rounds,
        "requests_per_run": asked.requests,
        "halted_fraction": halted,
        "comparisons": {side: _compared(asked.folder, rounds, side, gates) for side in ("again", "slow")},
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(record, indent=1) + "\n")
    for side, result in record["comparisons"].items():
        print(f"{side}: {result['verdict']}")
        for gate in result["gates"]:
            print(f"  {gate['gate']} at {gate['level']}: {gate['decision']}, {gate['reason']}")


def _deployment(folder: Path, model: Path) -> Path:
    """One thread, so that the client has a core of its own on a machine of two."""
    limits = {"context_tokens": 512, "sequences": 4, "threads": 1}
    one = {"name": "m", "path": str(model), "gpus": [], "limits": limits}
    file = folder / f"{_RACK}.yaml"
    file.write_text(yaml.safe_dump({"models": [one], "gateway": {"port": 0}}))
    return file


def _rounds(asked: argparse.Namespace, file: Path, engine_pid: int) -> tuple[int, float]:
    """How many were done, and the part of the time that the engine was halted in the runs of SLOW."""
    halted: list[float] = []
    begun = time.monotonic()
    for number in range(asked.rounds):
        if time.monotonic() - begun > asked.most_seconds:
            break
        turn = number % len(_SIDES)
        for side in (*_SIDES[turn:], *_SIDES[:turn]):
            words = ["bench", str(file), "--concurrency", asked.concurrency, "--requests", str(asked.requests)]
            words += ["--input-tokens", "32", "--output-tokens", "16", "--workers", "1"]
            words += ["-o", str(asked.folder / f"{side}{number}")]
            with _halted(engine_pid, asked.stopped if side == "slow" else 0.0) as share:
                _llamarack(*words, timeout_s=_BENCH_TIMEOUT_S, codes=(0, 7))
            halted += share
            print(f"round {number + 1} of {asked.rounds}: {side}", flush=True)
    return len(halted), sum(halted) / len(halted)


@contextlib.contextmanager
def _halted(pid: int, fraction: float) -> Iterator[list[float]]:
    """Yields a list that holds the part really halted once the block is left; empty for 0."""
    measured: list[float] = []
    if fraction == 0:
        yield measured
        return
    over = threading.Event()

    def halt() -> None:
        begun, halted = time.monotonic(), 0.0
        try:
            while not over.wait(_PERIOD_S * (1 - fraction)):
                os.kill(pid, signal.SIGSTOP)
                at = time.monotonic()
                time.sleep(_PERIOD_S * fraction)
                os.kill(pid, signal.SIGCONT)
                halted += time.monotonic() - at
        finally:
            os.kill(pid, signal.SIGCONT)
        measured.append(halted / (time.monotonic() - begun))

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield measured
    finally:
        over.set()
        thread.join()


def _engine_pid() -> int:
    status = json.loads(_llamarack("status", "--rack", _RACK, "--json", timeout_s=_COMMAND_TIMEOUT_S).stdout)
    return int(status["models"][0]["replicas"][0]["pid"])


def _speed_gates(folder: Path) -> Path:
    """The default template without its gate on consistency, which is `verify`'s to answer."""
    value = load_gates("default").model_dump(mode="json", exclude_none=True)
    value["gates"] = [gate for gate in value["gates"] if "consistency" not in gate]
    path = folder / "gates.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def _compared(folder: Path, rounds: int, side: str, gates: Path) -> dict[str, Any]:
    base, new = (",".join(str(folder / f"{one}{n}") for n in range(rounds)) for one in ("base", side))
    words = ["compare", base, new, "--gates", str(gates), "--accept-invalid", "--json"]
    done = _llamarack(*words, "-o", str(folder / f"compare-{side}"), timeout_s=_COMMAND_TIMEOUT_S, codes=(0, 6, 7))
    record = json.loads(done.stdout)
    kept = ("gate", "level", "decision", "reason", "measured", "interval", "detectable", "repeats")
    return {
        "verdict": record["verdict"],
        "exit_code": done.returncode,
        "is_interleaved": record["is_interleaved"],
        "gates": [{name: gate[name] for name in kept} for gate in record["gates"]],
    }


def _llamarack(*words: str, timeout_s: float, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamarack", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode not in codes:
        sys.exit(f"{' '.join(words[:2])} gave {done.returncode}: {done.stderr[-800:]}")
    return done


if __name__ == "__main__":
    main()
