"""Feeds broken model files to the readers: only ModelError may come out, in bounded time and memory.

Run from the repository's root: `python -m tests.model.fuzz --cases 10000 --seed 1 -o RESULT.json`. The limits are the
operating system's: an address-space limit set after the imports, and a timer that interrupts a case.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import signal
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from llamarack.errors import ModelError
from llamarack.model.check import check_identity
from llamarack.model.read import read_model
from tests import gguf_files
from tests.gguf_files import F16, SMALL, llama_metadata, llama_rows
from tests.huggingface_files import write_sharded

CASE_LIMIT_S = 20
MEMORY_LIMIT_BYTES = 512 * 1024**2  # over what the process has once everything is imported
INTEGERS = [0, 1, 2, 3, 4, 8, 9, 31, 32, 255, 65_535, 2**20, 2**27, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62]
INTEGERS += [2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    1.5,
    1e308,
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    [0],
    {"": {}},
]
VALUES += ["x" * 5000, [2**62] * 9, {"a": [1, {"b": None}]}]


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    """One to three changes: cut, flip, overwrite a field that looks like a length, delete, double or swap a stretch."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(7):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2 | 3:
                at = _length_field(rng, data)
                data[at : at + 8] = struct.pack("<Q", rng.choice(INTEGERS))
            case 4:
                data[at : at + 4] = struct.pack("<I", rng.choice(INTEGERS) % 2**32)
            case 5:
                del data[at : at + rng.randint(1, 40)]
            case 6:
                data[at:at] = data[at : at + rng.randint(1, 400)]
    return bytes(data)


def _length_field(rng: random.Random, data: bytearray) -> int:
    """A place where 8 bytes hold a small number; a count, a length, a dimension or an offset most of the time."""
    for _ in range(200):
        at = rng.randrange(max(len(data) - 8, 1))
        if 0 < int.from_bytes(data[at : at + 8], "little") < 2**20:
            return at
    return rng.choice((8, 16))


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Replaces, removes or doubles one value somewhere in the tree."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = {**value, key: mutate_json(rng, value[key])}
        if rng.random() < 0.1:
            del changed[key]
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_json(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


class Fuzz:
    """Prepared honest files, and one broken copy of them at a time under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = llama_rows(**SMALL, type_id=F16, head_type_id=F16)
        more: dict[str, Any] = {"tokenizer.chat_template": "{{ '<|im_start|>' }}", "llama.rope.scale": [1.0, 2.0]}
        more |= {"llama.attention.head_count_kv": [2, 2], "general.alignment": 32}
        self.gguf = gguf_files.header(llama_metadata(**SMALL) | more, rows)
        self.gguf_bytes = len(self.gguf) + 32 + sum(-(-gguf_files.size_bytes(row) // 32) * 32 for row in rows)
        model = write_sharded(folder / "hf", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
        self.honest = {file.name: file.read_bytes() for file in model.iterdir()}

    def write_gguf(self, rng: random.Random) -> Path:
        path = self.folder / "m.gguf"
        with path.open("wb") as file:
            file.write(mutate_bytes(rng, self.gguf))
            file.truncate(rng.choice((self.gguf_bytes, self.gguf_bytes, 2**30, 2**37, rng.randrange(self.gguf_bytes))))
        return path

    def write_huggingface(self, rng: random.Random) -> Path:
        folder = self.folder / "hf"
        name = rng.choice(sorted(self.honest))
        raw = self.honest[name]
        if name.endswith(".json") and rng.random() < 0.8:
            broken = json.dumps(mutate_json(rng, json.loads(raw))).encode()
        elif name.endswith(".safetensors") and rng.random() < 0.7:
            length = int.from_bytes(raw[:8], "little")
            header = json.dumps(mutate_json(rng, json.loads(raw[8 : 8 + length]))).encode()
            broken = struct.pack("<Q", len(header)) + header + raw[8 + length :]
        else:
            broken = mutate_bytes(rng, raw)
        for file in folder.iterdir():
            if file.name in self.honest and file.read_bytes() != self.honest[file.name]:
                file.write_bytes(self.honest[file.name])
        (folder / name).write_bytes(broken)
        return folder

    def run_case(self, seed: int) -> str:
        """`accepted` or the class of the refusal; anything but ModelError is let through."""
        rng = random.Random(seed)
        path = self.write_gguf(rng) if seed % 2 else self.write_huggingface(rng)
        try:
            check_identity(read_model(path))
        except ModelError as error:
            if not error.hint:
                raise LookupError(f"no hint: {error.message}") from error
            return "refused"
        return "accepted"


def run(cases: int, first_seed: int) -> dict[str, Any]:
    def interrupt(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"a case took over {CASE_LIMIT_S} s")

    signal.signal(signal.SIGALRM, interrupt)
    outcomes: Counter[str] = Counter()
    slowest_s, slowest_seed = 0.0, first_seed
    with tempfile.TemporaryDirectory() as name:
        fuzz = Fuzz(Path(name))
        limit_memory()
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(first_seed, first_seed + cases):
            started = time.perf_counter()
            signal.alarm(CASE_LIMIT_S)
            try:
                outcomes[fuzz.run_case(seed)] += 1
            except BaseException:
                print(f"seed {seed}")
                raise
            finally:
                signal.alarm(0)
            took_s = time.perf_counter() - started
            if took_s > slowest_s:
                slowest_s, slowest_seed = took_s, seed
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cases": cases,
        "first_seed": first_seed,
        "outcomes": dict(outcomes),
        "slowest_case_s": round(slowest_s, 3),
        "slowest_seed": slowest_seed,
        "peak_growth_bytes": (after_kib - before_kib) * 1024,
        "memory_limit_bytes": MEMORY_LIMIT_BYTES,
        "python": platform.python_version(),
    }


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size_bytes = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result = json.dumps(run(options.cases, options.seed), indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n")
