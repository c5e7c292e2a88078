"""The whole of `demo --once` against loading the same model and asking the same question directly.

python -m benchmarks.demo_once [--repeats 7] [--realtime]

Directly: one Python program that loads the model with the same engine and the same settings, asks the same greedy
question and ends. Beside it the whole of `demo --once`, in a state folder of its own (a first start) and in the one of
the repeat before (a rack that starts again). All alternate within one run; wall time of the whole
process, and processor time with all its children. Needs the demo model in the cache.

`--realtime`: all with real-time priority (SCHED_RR), for a machine that others use as well: two threads that wait for
each other at every layer take ten times as long where a third one competes. Needs the right to it.
"""

import argparse
import json
import os
import resource
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


def _spent(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or not done.stdout.strip():
        sys.exit(f"{command[:4]} gave {done.returncode}: {done.stderr[-500:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--realtime", action="store_true")
    asked = parser.parse_args()
    model = demo_model(cache_dir(), print)
    threads = str(len(os.sched_getaffinity(0)))
    machine = describe_machine()
    if asked.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    walls: dict[str, list[float]] = {"direct": [], "first start": [], "started again": []}
    processor: dict[str, list[float]] = {name: [] for name in walls}
    # In memory, as the folder of a session is ($XDG_RUNTIME_DIR).
    memory = next(
        (path for path in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm") if path and os.access(path, 2)), None
    )
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        # Installed packages have their bytecode.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**inherited, "LLAMARACK_STATE_DIR": f"{folder}/s", "LLAMARACK_LOAD_LOCK": f"{folder}/lock"}
        ours = [sys.executable, "-m", "llamarack", "demo", "--once", "--prompt", _QUESTION]
        for repeat in range(asked.repeats + 1):
            direct = [sys.executable, "-c", _DIRECT, str(model), f"{folder}/{repeat}.sock", threads, _QUESTION]
            fresh = {**environment, "LLAMARACK_STATE_DIR": f"{folder}/{repeat}"}
            runs = {"direct": (direct, environment), "first start": (ours, fresh), "started again": (ours, environment)}
            for name, (command, variables) in runs.items():
                wall, spent = _spent(command, variables)
                if repeat:  # the first of each warms the page cache, and is what `started again` was before
                    walls[name].append(wall)
                    processor[name].append(spent)
    ratios = {name: [a / b for a, b in zip(walls[name], walls["direct"], strict=True)] for name in (*walls,)[1:]}
    for name, values in walls.items():
        shown = f"{name:14} {statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f}), processor "
        shown += f"{statistics.median(processor[name]):.2f} s"
        print(shown + (f", {statistics.median(ratios[name]):.2f} of direct" if name in ratios else ""))
    record = {
        "machine": machine,
        "priority": "real time" if asked.realtime else "normal",
        "wall_s": walls,
        "processor_s": processor,
        "ratios": ratios,
    }
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
