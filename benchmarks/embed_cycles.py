"""Does opening and closing an embedded model give the memory back, every time?

Run from the repository's root: `python benchmarks/embed_cycles.py [--model FILE] [--cycles 1000] [-o RESULT.json]`.
Each cycle opens, answers once, streams once, closes. Resident memory, threads and file descriptors are read after each
close; the slope is a least-squares fit over the second half, when allocator and library have settled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from llamarack import embed
from tests.tiny_model import write_tiny_llama


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(model: Path, cycles: int) -> dict[str, Any]:
    start_bytes = resident_bytes()
    open_bytes, closed_bytes, threads, descriptors = [], [], [], []
    for _ in range(cycles):
        with embed.open(model, contexts=2, context_tokens=512, threads=1) as opened:
            opened.chat([{"role": "user", "content": "hello"}], max_tokens=4)
            list(opened.stream_complete("hello", max_tokens=4))
            open_bytes.append(resident_bytes())
        gc.collect()
        closed_bytes.append(resident_bytes())
        threads.append(len(os.listdir("/proc/self/task")))
        descriptors.append(len(os.listdir("/proc/self/fd")))
    half = np.array(closed_bytes[cycles // 2 :], dtype=float)
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else None
    tenth = max(cycles // 10, 1)
    return {
        "model": model.name,
        "cycles": cycles,
        "resident_before_bytes": start_bytes,
        "resident_open_last_bytes": open_bytes[-1],
        "resident_closed_every_tenth_bytes": closed_bytes[tenth - 1 :: tenth],
        "slope_second_half_bytes_per_cycle": round(slope) if slope is not None else None,
        "threads_closed": {"cycle_10": threads[min(9, cycles - 1)], "last": threads[-1]},
        "file_descriptors_closed": {"cycle_10": descriptors[min(9, cycles - 1)], "last": descriptors[-1]},
        "counts": {"open": embed.counts().open, "leaked": embed.counts().leaked},
        "xllamacpp": version("xllamacpp"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: a tiny one made for the run")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("LLAMARACK_LOAD_LOCK", f"{folder}/load.lock")
        made = options.model or write_tiny_llama(Path(folder) / "tiny.gguf")
        result = json.dumps(measure(made, options.cycles), indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n")
