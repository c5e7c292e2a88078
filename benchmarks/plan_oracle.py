"""Does the plan agree with llama.cpp's own dry run on this machine? Reads no weights: the models are headers only.

    python -m benchmarks.plan_oracle /path/to/llama-fit-params [--cards 2]

Prints, per device and setting, weights, KV and compute as the engine says and as the plan says, in MiB; the last line
counts the rows within 1 MiB, and those where the engine wants more than the plan's upper end (there must be none).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from llamarack.config import Group, Limits
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Machine
from llamarack.plan.dry_run import DryRow, dry_run
from llamarack.plan.planner import plan_group
from llamarack.plan.record import Candidate
from llamarack.plan.reference import LLAMA2, gguf_spec
from llamarack.units import MIB
from tests.plan.files import sparse_gguf

_LABEL = "Q8_0"


def groups(cards: int) -> Iterator[Group]:
    """Every way to share, on every context, step and KV type that the formulas tell apart."""
    indices: list[int | str | list[int | str]] = list(range(cards))
    for context, micro, kv, sequences in product((4096, 16384), (128, 512), ("f16", "q8_0"), (1, 4)):
        limits = Limits(context_tokens=context, batch_tokens=micro, kv_dtype=kv, sequences=sequences)  # type: ignore[arg-type]
        if cards == 1:
            yield Group(gpus=indices, split_mode="none", limits=limits)
            continue
        even = [1 / cards] * cards
        uneven = [0.7, *[0.3 / (cards - 1)] * (cards - 1)]
        for share in (even, uneven):
            yield Group(gpus=indices, split_mode="layer", tensor_split=share, limits=limits)
        if kv == "f16":
            yield Group(gpus=indices, split_mode="tensor", tensor_split=even, limits=limits)


def compare(binary: Path, machine: Machine, cards: int, folder: Path) -> Iterator[tuple[str, Candidate, list[DryRow]]]:
    for name, size in LLAMA2.items():
        path = sparse_gguf(folder / f"{name}.gguf", size, _LABEL)
        spec = gguf_spec(size, _LABEL)
        for group in groups(cards):
            candidate = plan_group(spec, group, machine, model_name=name)
            rows = dry_run(binary, candidate, path)
            limits = group.limits
            setting = f"{name} {group.split_mode} {limits.context_tokens} x {limits.sequences} {limits.kv_dtype}"
            setting += f" ub {limits.batch_tokens} {candidate.tensor_split or ''}"
            if rows is None:
                print(f"{setting}: no answer")
            else:
                yield setting, candidate, list(rows[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--cards", type=int, default=1)
    asked = parser.parse_args()
    exact = above = total = 0
    with TemporaryDirectory() as folder:
        for setting, candidate, rows in compare(asked.binary, detect_machine(), asked.cards, Path(folder)):
            for card, row in zip(candidate.cards, rows, strict=False):
                terms = card.terms
                # The dry run wants logits of every token, as the plan's upper end does; both without the context.
                high = card.total_high_bytes - terms.weights_bytes - terms.kv_bytes
                said = row.weights_bytes, row.kv_bytes, row.compute_bytes
                planned = terms.weights_bytes, terms.kv_bytes, terms.compute_bytes
                pairs = ", ".join(f"{a // MIB} / {b // MIB}" for a, b in zip(said, planned, strict=True))
                print(f"{setting} {row.device}: {pairs} (compute and context at most {high // MIB})")
                total += 1
                exact += all(abs(a // MIB - b // MIB) <= 1 for a, b in zip(said[:2], planned[:2], strict=True))
                above += sum(said) > card.total_high_bytes
    print(f"{total} rows: weights and KV within 1 MiB in {exact}; engine above the upper end in {above}")


if __name__ == "__main__":
    main()
