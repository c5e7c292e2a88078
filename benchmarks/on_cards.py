"""Deployments served one after the other on real cards: predicted and actual memory per card and term, and speed.

python -m benchmarks.on_cards RUNS.yaml -o results.jsonl [--seconds 500]

RUNS.yaml is a list of `{name, deployment, bench, beside_engine, killed_rank}`: a deployment file's content, and options
of `llamarack bench` by name (left out: only memory is read). `beside_engine: N` runs the same load N times through the
gateway and N times on the only engine's own socket, in turn. `killed_rank` holds the options of `killed_rank.kill`.
Every run is started by `llamarack serve`, read when all its replicas are ready and again after the load, and stopped;
the cards' memory is what `nvidia-smi` shows, not what the engine says. One JSON line a run, written as it ends, so that
a run cut short keeps what it has. Runs that would begin after `--seconds` are named as not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import killed_rank
from llamarack.errors import NothingRunning
from llamarack.paths import RackPaths, rack_paths
from llamarack.supervise.admin import ask

_STOP_S = 90
_QUERY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]


def card_mib() -> dict[int, int] | None:
    """Used MiB by card index; None where there is no nvidia-smi."""
    try:
        shown = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return {int(index): int(used) for index, used in (line.split(",") for line in shown.strip().splitlines())}


def status_of(paths: RackPaths) -> dict[str, Any] | None:
    try:
        return asyncio.run(ask(paths, {"op": "status"}))
    except NothingRunning:
        return None


def replicas_of(status: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [replica for model in (status or {"models": []})["models"] for replica in model["replicas"]]


def wait_ready(process: subprocess.Popen[bytes], paths: RackPaths, deadline_s: float) -> dict[str, Any] | None:
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends and process.poll() is None:
        status = status_of(paths)
        replicas = replicas_of(status)
        if replicas and all(replica["state"] in ("ready", "failed") for replica in replicas):
            return status
        time.sleep(0.5)
    return None


def load(url: str, options: dict[str, Any], folder: Path, key: str | None = None) -> dict[str, Any]:
    environment = os.environ if key is None else {**os.environ, "LLAMARACK_API_KEY": key}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "llamarack", "bench", url, "--json", "-o", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    try:
        return dict(json.loads(done.stdout))
    except json.JSONDecodeError:
        return {"exit": done.returncode, "error": done.stderr[-2000:]}


def beside_engine(run: dict[str, Any], url: str, paths: RackPaths, folder: Path) -> list[dict[str, Any]]:
    """The gateway and the engine behind it under the same load, in turn; the order changes from round to round."""
    (replica,) = json.loads(paths.state.read_bytes())["replicas"]
    endpoint = replica["endpoint"]
    own = f"unix://{endpoint['socket']}" if endpoint["socket"] else f"http://127.0.0.1:{endpoint['port']}"
    rounds = []
    for number in range(run["beside_engine"]):
        ways: list[tuple[str, str, str | None]] = [("gateway", url, None), ("engine", own, endpoint["key"])]
        if number % 2:
            ways.reverse()
        rounds.append(
            {name: load(to, run["bench"], folder / f"{name}-{number}", key).get("points") for name, to, key in ways}
        )
    return rounds


def one_run(run: dict[str, Any], folder: Path, start_s: float) -> dict[str, Any]:
    file = folder / "rack.yaml"
    folder.mkdir(parents=True)
    gateway = {"port": 0} | run["deployment"].get("gateway", {})
    file.write_text(yaml.safe_dump({"schema_version": 1, **run["deployment"], "gateway": gateway}))
    paths = rack_paths("rack", folder / "state")
    before = card_mib()
    started = time.monotonic()
    with open(folder / "serve.out", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "llamarack", "serve", str(file), "--state-dir", str(folder / "state")],
            stdout=output,
            stderr=output,
        )
    record: dict[str, Any] = {"name": run["name"], "deployment": run["deployment"], "before_mib": before}
    try:
        status = wait_ready(process, paths, start_s)
        if status is None:
            record["failed"] = (folder / "serve.out").read_text()[-3000:]
            return record
        record |= {"start_s": round(time.monotonic() - started, 1), "ready_mib": card_mib()}
        record["replicas"] = [
            {key: replica[key] for key in ("id", "state", "cards", "start_seconds", "predicted", "actual")}
            for replica in replicas_of(status)
        ]
        if run.get("bench"):
            url = f"http://127.0.0.1:{status['gateway']['port']}"
            record["bench"] = load(url, run["bench"], folder / "bench")
            record["after_load_mib"] = card_mib()
            record["watched"] = (status_of(paths) or {}).get("cards")
            if run.get("beside_engine"):
                record["beside_engine"] = beside_engine(run, url, paths, folder)
        if run.get("killed_rank"):
            url = f"http://127.0.0.1:{status['gateway']['port']}"
            record["killed_rank"] = killed_rank.kill(url, lambda: status_of(paths), run["killed_rank"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        record["after_stop_mib"] = card_mib()
    return record


def short(record: dict[str, Any]) -> str:
    """One line for people: what was predicted, what was there, how fast it was."""
    if "failed" in record:
        return f"{record['name']}: FAILED {record['failed'][-300:]!r}"
    mib = 1024**2
    words = [f"{record['name']}: ready {record['start_s']} s"]
    for replica in record["replicas"]:
        for card in replica["predicted"]["cards"]:
            used = (record["ready_mib"] or {}).get(card["index"])
            words.append(f"card {card['index']} predicted {card['total_bytes'] // mib} used {used}")
    for point in record.get("bench", {}).get("points", []):
        metrics = point["metrics"]
        words.append(
            f"at {point.get('concurrency')}: {point['output_tokens_per_s']:.0f} tok/s "
            f"ttft {metrics['ttft_s']['p50']} per token {metrics['per_token_s']['p50']} failures {point['failures']}"
        )
    if "killed_rank" in record:
        seen = record["killed_rank"]
        words.append(
            f"killed: across {seen['across_the_kill']}, after {seen['sent_after_it']}, again {seen['ready_again_s']}"
        )
    for ways in record.get("beside_engine", []):
        shown = (f"{name} {[round(point['output_tokens_per_s']) for point in ways[name] or ()]}" for name in ways)
        words.append("tok/s " + ", ".join(shown))
    return "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no run begins later than this")
    parser.add_argument("--start-s", type=float, default=300.0, help="deadline of one start")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: a rack left behind holds its cards
    ends = time.monotonic() + options.seconds
    work = options.output.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    for number, run in enumerate(yaml.safe_load(options.runs.read_text())):
        if time.monotonic() > ends:
            record: dict[str, Any] = {"name": run["name"], "failed": "not run: no time left"}
        else:
            record = one_run(run, work / str(number), options.start_s)
        with options.output.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(short(record), flush=True)


if __name__ == "__main__":
    main()
