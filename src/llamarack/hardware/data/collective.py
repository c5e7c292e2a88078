"""Do the cards compute and add up together? Standard library and torch; runs in the engine's own interpreter.

    python collective.py BACKEND WORLD        BACKEND: nccl (one rank per visible card) or gloo (processor)

Prints one JSON object per line as each thing is done, so that whoever kills a hung run knows how far it came:
`{"event": "ready"}` once all ranks have met, `matrix` per rank, `reduce` per size, `done`. All numbers are small
integers, which every format here holds exactly, so results are compared for equality and not within a tolerance.
"""

import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

SIZES = ((8 * 1024, 50), (1024**2, 50), (64 * 1024**2, 10))  # bytes of one message, timed repetitions
GLOO_REPETITIONS = 3
MEETING_S = 45


def main() -> int:
    if len(sys.argv) == 5:
        rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return 0
    backend, world = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="llamarack-check-") as folder:
        # Ranks meet through a file: no port to be taken by somebody else.
        store = os.path.join(folder, "store")
        ranks = [
            subprocess.Popen([sys.executable, os.path.abspath(__file__), backend, str(world), str(number), store])
            for number in range(world)
        ]
        try:
            return wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """0 once all ranks ended well, else the first bad status: a lost rank would let the others wait for ever."""
    while True:
        states = [process.poll() for process in ranks]
        bad = [state for state in states if state]
        if bad:
            return 1
        if all(state == 0 for state in states):
            say(event="done")
            return 0
        time.sleep(0.05)


def rank(backend: str, world: int, number: int, store: str) -> None:
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    on_card = backend == "nccl"
    device = torch.device("cuda", number) if on_card else torch.device("cpu")
    if on_card:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    say(event="matrix", rank=number, correct=matrix_is_right(torch, device))
    distributed.init_process_group(
        backend,
        init_method="file://" + store,
        rank=number,
        world_size=world,
        timeout=datetime.timedelta(seconds=MEETING_S),
    )
    if number == 0:
        say(event="ready")
    for size_bytes, repetitions in SIZES:
        correct, seconds = reduce(torch, distributed, device, size_bytes, repetitions if on_card else GLOO_REPETITIONS)
        say(event="reduce", rank=number, size_bytes=size_bytes, correct=correct, seconds=seconds)
    distributed.barrier()
    distributed.destroy_process_group()


def matrix_is_right(torch: Any, device: Any) -> bool:
    """Products of integers from -3 to 3 over 64 terms stay below 577: exact in fp16 and in TF32."""
    generator = torch.Generator().manual_seed(20261130)
    left = torch.randint(-3, 4, (1024, 64), generator=generator)
    right = torch.randint(-3, 4, (64, 1024), generator=generator)
    expected = left @ right
    for kind in (torch.float32, torch.float16):
        product = (left.to(device, kind) @ right.to(device, kind)).to("cpu", torch.int64)
        if not torch.equal(product, expected):
            return False
    return True


def reduce(torch: Any, distributed: Any, device: Any, size_bytes: int, repetitions: int) -> tuple[bool, float]:
    """Whether every element of the sum is right, and seconds of one all-reduce, launched one by one."""
    world, number = distributed.get_world_size(), distributed.get_rank()
    pattern = torch.arange(size_bytes // 4, dtype=torch.float32, device=device) % 251
    values = pattern + number
    distributed.all_reduce(values)
    correct = bool(torch.equal(values, pattern * world + world * (world - 1) / 2))
    scratch = torch.zeros_like(pattern)
    distributed.all_reduce(scratch)
    synchronize(torch, device)
    started_s = time.perf_counter()
    for _ in range(repetitions):
        distributed.all_reduce(scratch)
    synchronize(torch, device)
    return correct, (time.perf_counter() - started_s) / repetitions


def synchronize(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(**values: Any) -> None:
    # One write, so that the lines of several ranks do not mix in the pipe.
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
