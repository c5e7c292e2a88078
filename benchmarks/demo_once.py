"""The whole of `demo --once` against loading the same model and asking the same question directly.

python benchmarks/demo_once.py [--repeats 7]

Directly: one Python program that loads the model with the same engine and the same settings, asks the same greedy
question and ends. Both alternate within one run, wall time of the whole process. Needs the demo model in the cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe_machine
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir

_QUESTION = "What is the capital of France?"
_RESULT = Path(__file__).with_name("results") / "demo_once.json"
_DIRECT = """
import sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.fit_params = sys.argv[1], 4 * 2048, 4, False
p.n_batch, p.n_ubatch, p.hostnames = 2048, 512, [sys.argv[2]]
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(p)
answer = server.handle_chat_completions({"messages": [
    {"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": sys.argv[4]}],
    "max_tokens": 128, "temperature": 0, "stream": False})
print(answer["choices"][0]["message"]["content"])
"""


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        sys.exit(f"{command[:4]} gave {done.returncode}: {done.stderr[-500:]}")
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    model = demo_model(cache_dir(), print)
    threads = str(len(os.sched_getaffinity(0)))
    walls: dict[str, list[float]] = {"direct": [], "demo --once": []}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LLAMARACK_STATE_DIR": folder, "LLAMARACK_LOAD_LOCK": f"{folder}/lock"}
        for repeat in range(repeats + 1):
            socket = f"{folder}/{repeat}.sock"
            direct = [sys.executable, "-c", _DIRECT, str(model), socket, threads, _QUESTION]
            ours = [sys.executable, "-m", "llamarack", "demo", "--once", "--prompt", _QUESTION]
            for name, command in (("direct", direct), ("demo --once", ours)):
                wall = _seconds(command, environment)
                if repeat:  # the first pair warms the page cache
                    walls[name].append(wall)
    for name, values in walls.items():
        low, high = min(values), max(values)
        print(f"{name:12} {statistics.median(values):.2f} s ({low:.2f}-{high:.2f} over {repeats} repeats)")
    ratios = [ours / direct for direct, ours in zip(walls["direct"], walls["demo --once"], strict=True)]
    print(f"ratio        {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps({"machine": describe_machine(), "wall_s": walls, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
