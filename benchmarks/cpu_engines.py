"""The prebuilt wheel against a native build, and two replicas of one thread against one replica of two, on this CPU.

    python -m benchmarks.cpu_engines /path/to/llama-server -o benchmarks/results/cpu_engines.json

SmolLM2-135M Q4_1 behind the whole rack, closed loop at 1, 4 and 8 streams, prompts of 64 tokens, answers of 32. The
ways are started one after the other, several rounds over, so that a slow minute of the machine meets them all; medians
and ranges over the rounds. A file that exists is continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.on_cards import one_run
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir

LEVELS = (1, 4, 8)
_START_S = 300.0


def ways(binary: Path, model: Path, cores: int) -> dict[str, dict[str, Any]]:
    """Deployments by name; eight slots each, and all cores."""

    def deployment(replicas: int, engine_binary: Path | None) -> dict[str, Any]:
        limits = {"context_tokens": 512, "sequences": 8 // replicas, "threads": cores // replicas}
        one: dict[str, Any] = {"name": "m", "path": str(model), "gpus": [], "replicas": replicas, "limits": limits}
        if engine_binary is not None:
            one["engine_binary"] = str(engine_binary)
        return {"models": [one]}

    return {
        "wheel, 1 replica": deployment(1, None),
        "native, 1 replica": deployment(1, binary),
        "wheel, 2 replicas": deployment(2, None),
        "native, 2 replicas": deployment(2, binary),
    }


def measured(record: dict[str, Any]) -> dict[str, Any]:
    if "bench" not in record or "points" not in record["bench"]:
        return {"failed": str(record.get("failed") or record.get("bench"))[-500:]}
    rows = {}
    for point in record["bench"]["points"]:
        metrics = point["metrics"]
        rows[str(point["concurrency"])] = {
            "tokens_per_s": point["output_tokens_per_s"],
            "first_token_s": metrics["ttft_s"]["p50"],
            "per_token_s": metrics["per_token_s"]["p50"],
            "requests": point["requests"],
            "failures": point["failures"],
        }
    return rows


def summary(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in rounds[0] if rounds else ():
        for level in map(str, LEVELS):
            found = [one[name][level]["tokens_per_s"] for one in rounds if level in one.get(name, {})]
            firsts = [one[name][level]["first_token_s"] for one in rounds if level in one.get(name, {})]
            firsts = [each for each in firsts if each is not None]  # too few requests for a median
            if found:
                rows.append(
                    {
                        "way": name,
                        "concurrency": int(level),
                        "tokens_per_s": round(statistics.median(found), 1),
                        "range": [round(min(found), 1), round(max(found), 1)],
                        "first_token_s": round(statistics.median(firsts), 3) if firsts else None,
                        "rounds": len(found),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", default="10s", help="of each level")
    parser.add_argument("--cores", type=int, default=2)
    asked = parser.parse_args()
    model = demo_model(cache_dir(), print)
    bench = {"concurrency": ",".join(map(str, LEVELS)), "duration": asked.seconds}
    bench |= {"input-tokens": 64, "output-tokens": 32}
    rounds: list[dict[str, Any]] = []
    if asked.output.exists():
        rounds = json.loads(asked.output.read_text())["rounds"]
    while len(rounds) < asked.rounds:
        found = {}
        for name, deployment in ways(asked.binary, model, asked.cores).items():
            with TemporaryDirectory() as folder:
                run = {"name": name, "deployment": deployment, "bench": bench}
                found[name] = measured(one_run(run, Path(folder) / "run", _START_S))
            print(name, json.dumps(found[name]), flush=True)
        rounds.append(found)
        record = {"machine": describe_machine(), "model": model.name, "summary": summary(rounds), "rounds": rounds}
        asked.output.write_text(json.dumps(record, indent=1) + "\n")
    for row in summary(rounds):
        low, high = row["range"]
        print(f"{row['way']:20} {row['concurrency']:>2} streams {row['tokens_per_s']:8} tokens/s ({low} to {high})")


if __name__ == "__main__":
    main()
