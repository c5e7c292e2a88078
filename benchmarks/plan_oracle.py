"""Does the plan agree with llama.cpp's own dry run on this machine? Reads no weights: the models are headers only.

    python -m benchmarks.plan_oracle /path/to/llama-fit-params [--cards 2 | --cpu | --rpc 2] [-o results.json]

`--rpc N` starts N RPC servers of the same build on this processor. Prints, per device and setting, weights, KV and
compute as the engine says and as the plan says, in MiB, and counts the rows within 1 % or the MiB to which the tool
rounds, and those where the engine wants more than the plan's upper end (there must be none). The dry run wants logits
of every token, which a server does not; so its compute stands beside the plan's upper end without the context.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.machine import describe_machine
from llamarack.config import Group, Limits
from llamarack.engine.rpc_devices import with_remotes
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Machine
from llamarack.plan.dry_run import DryRow, dry_run
from llamarack.plan.engine_data import context_band
from llamarack.plan.planner import plan_group
from llamarack.plan.record import CPU_INDEX, Candidate, CardPlan
from llamarack.plan.reference import LLAMA2, Dimensions, gguf_spec
from llamarack.units import GIB, MIB
from tests.native import rpc_servers
from tests.plan.files import sparse_gguf

_LABEL = "Q8_0"
_BUILD = "b11434"
_SHARES = {1: [(1.0,)], 2: [(0.7, 0.3), (0.5, 0.5), (80 / 104, 24 / 104)], 3: [(0.34, 0.33, 0.33), (0.5, 0.3, 0.2)]}
# Beside LLaMA-2: a vocabulary so large that the logits decide, and grouped heads.
MODELS = LLAMA2 | {
    "llama3-8b": Dimensions(
        name="llama3-8b",
        layers=32,
        hidden_size=4096,
        feed_forward_size=14336,
        attention_heads=32,
        kv_heads=8,
        head_size=128,
        vocab_size=128256,
        context_train_tokens=131072,
    )
}


def groups(devices: int, servers: Sequence[str], *, on_cpu: bool) -> Iterator[Group]:
    """Every way to share, on every context, step and KV type that the formulas tell apart."""
    indices: list[int | str | list[int | str]] = [] if on_cpu or servers else list(range(devices))
    # A dry run allocates nothing, so the memory is whatever the largest needs.
    given = [f"{server}=1TiB" for server in servers]
    for context, micro, kv, sequences in product((4096, 16384), (128, 512), ("f16", "q8_0"), (1, 4)):
        limits = Limits(context_tokens=context, batch_tokens=micro, kv_dtype=kv, sequences=sequences)  # type: ignore[arg-type]
        base = Group(gpus=indices, rpc_servers=given, split_mode="none" if devices == 1 else "layer", limits=limits)
        if devices == 1:
            yield base
            continue
        for share in _SHARES[devices]:
            yield replace(base, tensor_split=[round(part, 4) for part in share])
        if kv == "f16":
            even = [1 / devices] * devices
            yield replace(base, tensor_split=even, gpu_layers=20)
            if not servers:  # over RPC the tool shows one device for all
                yield replace(base, tensor_split=even, split_mode="tensor")


def compare(
    binary: Path, machine: Machine, devices: int, servers: Sequence[str], folder: Path, *, on_cpu: bool
) -> Iterator[tuple[str, Candidate, list[DryRow]]]:
    for name, size in MODELS.items():
        path = sparse_gguf(folder / f"{name}.gguf", size, _LABEL)
        spec = gguf_spec(size, _LABEL)
        for group in groups(devices, servers, on_cpu=on_cpu):
            there = with_remotes(machine, [(group, None)]) if servers else machine
            candidate = plan_group(spec, group, there, model_name=name, engine_version=_BUILD)
            rows = dry_run(binary, candidate, path, rpc_servers=servers)
            limits = group.limits
            setting = f"{name} {group.split_mode} {limits.context_tokens} x {limits.sequences} {limits.kv_dtype}"
            setting += f" ub {limits.batch_tokens} {candidate.tensor_split or ''}"
            if group.gpu_layers != "all":
                setting += f" ngl {group.gpu_layers}"
            if rows is None:
                print(f"{setting}: no answer")
            else:
                yield setting, candidate, list(rows if on_cpu else rows[:-1])


def row_of(setting: str, card: CardPlan, said: DryRow) -> dict[str, Any]:
    """MiB by term: as the engine says, as planned, and whether they agree within 1 % or the rounding to whole MiB."""
    terms = card.terms
    backend = "cpu" if card.index == CPU_INDEX else "rpc" if card.index < CPU_INDEX else "cuda"
    context = context_band("llamacpp.yaml", backend, card=card.name, driver=None, build=None)
    compute = card.total_high_bytes - terms.weights_bytes - terms.kv_bytes - context.high_bytes
    planned = {"weights": terms.weights_bytes, "kv": terms.kv_bytes, "compute": compute}
    engine = {"weights": said.weights_bytes, "kv": said.kv_bytes, "compute": said.compute_bytes}
    within = {
        term: -0.01 * engine[term] <= planned[term] - engine[term] <= max(0.01 * engine[term], 1.01 * MIB)
        for term in planned
    }
    return {
        "setting": setting,
        "device": said.device,
        "engine_mib": {term: size // MIB for term, size in engine.items()},
        "planned_mib": {term: round(size / MIB, 1) for term, size in planned.items()},
        "within_1_percent": within,
        "above_upper_end": sum(engine.values()) > card.total_high_bytes,
    }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    def is_close(row: dict[str, Any]) -> bool:
        engine, planned = sum(row["engine_mib"].values()), sum(row["planned_mib"].values())
        return bool(-0.01 * engine <= planned - engine <= max(0.01 * engine, 3.03))  # three terms rounded down

    terms = ("weights", "kv", "compute")
    return {
        "rows": len(rows),
        **{f"{term}_within_1_percent": sum(row["within_1_percent"][term] for row in rows) for term in terms},
        "device_total_within_1_percent": sum(map(is_close, rows)),
        "engine_above_upper_end": sum(row["above_upper_end"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="the processor alone")
    parser.add_argument("--rpc", type=int, default=0, metavar="N", help="N RPC devices on this processor")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    machine = detect_machine()
    if asked.cpu or asked.rpc:  # nothing is allocated: what matters are sizes, not whether they fit here
        host = replace(machine.host, memory_total_bytes=1024 * GIB, memory_available_bytes=1024 * GIB)
        machine = replace(machine, host=host)
    devices = 1 if asked.cpu else asked.rpc or asked.cards
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        servers = stack.enter_context(rpc_servers(asked.binary, asked.rpc, folder)) if asked.rpc else []
        found = compare(asked.binary, machine, devices, servers, folder, on_cpu=asked.cpu)
        for setting, candidate, said in found:
            for card, row in zip(candidate.cards, said, strict=False):
                one = row_of(setting, card, row)
                rows.append(one)
                pairs = ", ".join(f"{one['engine_mib'][t]} / {one['planned_mib'][t]}" for t in one["engine_mib"])
                print(f"{setting} {row.device}: {pairs}{'' if all(one['within_1_percent'].values()) else '  <--'}")
    summary = summary_of(rows)
    print(json.dumps(summary))
    if asked.output is not None:
        record = {"machine": describe_machine(), "build": _BUILD, "summary": summary, "rows": rows}
        asked.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
