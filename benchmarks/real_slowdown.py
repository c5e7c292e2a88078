"""Does `compare` find a real slowdown, and does it leave equal runs alone? On a real engine, by the commands.

    python -m benchmarks.real_slowdown [FILE] --rounds 8 --stopped 0.1 -o benchmarks/results/real_slowdown.json
    python -m benchmarks.real_slowdown card.yaml --rounds 6 --concurrency 8 --requests 48 --input-tokens 128 \
        --output-tokens 128 --period 0.3 --most-seconds 200 -o benchmarks/results/real_slowdown_card.json

FILE is a deployment of one model (any engine, on cards or not), or a model file, which gets one processor thread; left
out, it is the demo model. One rack; in each round three runs of `bench`: BASE, the same AGAIN, and SLOW, during which
all processes of the engine are halted together for the given part of every period (SIGSTOP, SIGCONT), as by a neighbour
on its cores. The order within a round turns, so that no side always comes first. Then `compare BASE AGAIN` and `compare
BASE SLOW` with the default gates of speed; both reports stay in the folder beside the result. What the machine did
meanwhile is in the intervals, and the result says what they could have shown.

A card goes on with the step that it was given before the halt, so a halt costs up to a step less than it lasts: let the
halts be long against a step (`--period 0.3` for steps of 5 to 10 ms) and the answers long against a period.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.machine import describe_machine
from llamarack.cli.serving import load_target, rack_name
from llamarack.config import plain
from llamarack.judge.gates import load_gates
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir

_SIDES = ("base", "again", "slow")
_START_TIMEOUT_S, _BENCH_TIMEOUT_S, _COMMAND_TIMEOUT_S = 600, 600, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="deployment or model; default: the demo model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--most-seconds", type=float, default=3600.0, help="no round is begun after so many")
    parser.add_argument("--requests", type=int, default=20, help="of one run")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--stopped", type=float, default=0.1, help="part of the time that SLOW is halted")
    parser.add_argument("--period", type=float, default=0.04, help="seconds from one halt to the next")
    parser.add_argument("--folder", type=Path, default=Path("build/real_slowdown"), help="new; runs and reports")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: a rack left behind holds its cards
    asked.folder.mkdir(parents=True)
    file = asked.file or demo_model(cache_dir(), print)
    if file.suffix not in (".yaml", ".yml"):
        file = _one_thread(asked.folder, file)
    served, rack = load_target(file, host=None, port=None), rack_name(file)
    _llamarack("serve", str(file), "--detach", timeout_s=_START_TIMEOUT_S)
    try:
        rounds, halted = _rounds(asked, file, _engine(rack))
    finally:
        _llamarack("stop", "--rack", rack, timeout_s=_COMMAND_TIMEOUT_S)
    gates = _speed_gates(asked.folder)
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "deployment": plain(served, without_defaults=True),
        "load": {
            "concurrency": asked.concurrency,
            "requests_per_run": asked.requests,
            "input_tokens": asked.input_tokens,
            "output_tokens": asked.output_tokens,
        },
        "rounds": rounds,
        "halts": {"period_s": asked.period, "asked_fraction": asked.stopped, "measured_fraction": halted},
        "speed": {side: [_speed(asked.folder / f"{side}{n}") for n in range(rounds)] for side in _SIDES},
        "comparisons": {side: _compared(asked.folder, rounds, side, gates) for side in ("again", "slow")},
    }
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"SLOW was halted for {halted:.1%} of its time")
    for side, result in record["comparisons"].items():
        print(f"BASE against {side.upper()}: {result['verdict']}")
        for gate in result["gates"]:
            print(f"  {gate['gate']} at {gate['level']}: {gate['decision']}, {gate['reason']}")


def _one_thread(folder: Path, model: Path) -> Path:
    """So that the client has a core of its own on a machine of two."""
    limits = {"context_tokens": 512, "sequences": 4, "threads": 1}
    one = {"name": "m", "path": str(model.absolute()), "gpus": [], "limits": limits}
    file = folder / "slowdown.yaml"
    file.write_text(yaml.safe_dump({"models": [one], "gateway": {"port": 0}}))
    return file


def _rounds(asked: argparse.Namespace, file: Path, engine: list[psutil.Process]) -> tuple[int, float]:
    """How many were done, and the part of the time that the engine was halted in the runs of SLOW."""
    halted: list[float] = []
    begun = time.monotonic()
    for number in range(asked.rounds):
        if time.monotonic() - begun > asked.most_seconds:
            break
        turn = number % len(_SIDES)
        for side in (*_SIDES[turn:], *_SIDES[:turn]):
            words = ["bench", str(file), "--concurrency", str(asked.concurrency), "--requests", str(asked.requests)]
            words += ["--input-tokens", str(asked.input_tokens), "--output-tokens", str(asked.output_tokens)]
            words += ["--workers", "1", "-o", str(asked.folder / f"{side}{number}")]
            with _halted(engine, asked.stopped if side == "slow" else 0.0, asked.period) as share:
                _llamarack(*words, timeout_s=_BENCH_TIMEOUT_S, codes=(0, 7))
            halted += share
            took_s = time.monotonic() - begun
            print(f"{took_s:.0f} s: round {number + 1} of {asked.rounds}: {side}", flush=True)
    return len(halted), sum(halted) / len(halted)


@contextlib.contextmanager
def _halted(engine: list[psutil.Process], fraction: float, period_s: float) -> Iterator[list[float]]:
    """Yields a list that holds the part really halted once the block is left; empty for 0."""
    measured: list[float] = []
    if fraction == 0:
        yield measured
        return
    over = threading.Event()

    def halt() -> None:
        begun, halted = time.monotonic(), 0.0
        try:
            while not over.wait(period_s * (1 - fraction)):
                _send(engine, signal.SIGSTOP)
                at = time.monotonic()
                time.sleep(period_s * fraction)
                _send(engine, signal.SIGCONT)
                halted += time.monotonic() - at
        finally:
            _send(engine, signal.SIGCONT)
        measured.append(halted / (time.monotonic() - begun))

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield measured
    finally:
        over.set()
        thread.join()


def _send(engine: list[psutil.Process], what: signal.Signals) -> None:
    for process in engine:
        process.send_signal(what)


def _engine(rack: str) -> list[psutil.Process]:
    """Of every replica its own process and all below it: ranks, workers."""
    status = json.loads(_llamarack("status", "--rack", rack, "--json", timeout_s=_COMMAND_TIMEOUT_S).stdout)
    first = [psutil.Process(one["pid"]) for model in status["models"] for one in model["replicas"]]
    return [process for one in first for process in (one, *one.children(recursive=True))]


def _speed(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_bytes())
    (point,) = result["points"]
    medians = {name: point["metrics"][name]["p50"] for name in ("ttft_s", "per_token_s")}
    return {"valid": result["valid"], "output_tokens_per_s": point["output_tokens_per_s"], **medians}


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
