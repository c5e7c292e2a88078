"""The engine's own dry run, where its `llama-fit-params` is installed, against the plan. Starts one short process.

Output (tools/fit-params, b11434): per device `name model context compute` in MiB, then a `Host` line.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.plan.record import CPU_INDEX, Candidate
from llamarack.units import MIB, format_bytes

BINARY = "llama-fit-params"
_DEADLINE_S = 120.0
_ALL_LAYERS = 999


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRow:
    device: str
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int


def arguments(candidate: Candidate, model_path: Path, rpc_servers: Sequence[str] = ()) -> list[str]:
    """The plan's settings as options of the dry run, which knows those of llama-server but for `--kv-unified`: one
    sequence of the pool's size has the same buffers."""
    pool = candidate.context_tokens * (1 if candidate.kv_unified else candidate.sequences)
    options = {
        "-m": str(model_path),
        "-c": str(pool),
        "-np": "1" if candidate.kv_unified else str(candidate.sequences),
        "-ngl": str(_ALL_LAYERS if candidate.gpu_layers is None else candidate.gpu_layers)
        if any(candidate.replica_cards)
        else "0",
        "-b": str(candidate.batch_tokens),
        "-ub": str(candidate.micro_batch_tokens),
        "-ctk": candidate.kv_dtype,
        "-ctv": candidate.kv_dtype,
        "-fa": "on",
        "--fit": "off",
        "--fit-print": "on",
    }
    if candidate.split_mode:
        options["-sm"] = candidate.split_mode
    if candidate.tensor_split:
        options["-ts"] = ",".join(map(str, candidate.tensor_split))
    servers = ["--rpc", ",".join(rpc_servers)] if rpc_servers else []
    return [*servers, *(part for pair in options.items() for part in pair)]


def dry_run(
    binary: Path, candidate: Candidate, model_path: Path, *, rpc_servers: Sequence[str] = ()
) -> tuple[DryRow, ...] | None:
    """Rows of the first replica's devices, host last; None where the binary gives no answer within its deadline."""
    cards = ",".join(str(index) for index in candidate.replica_cards[0] if index >= 0)
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cards}
    try:
        done = subprocess.run(
            [str(binary), *arguments(candidate, model_path, rpc_servers)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse(done.stdout) if done.returncode == 0 else None


def parse(output: str) -> tuple[DryRow, ...] | None:
    rows = []
    for line in output.splitlines():
        parts = line.split()
        if len(parts) == 4 and all(part.isdigit() for part in parts[1:]):
            weights, kv, compute = (int(part) * MIB for part in parts[1:])
            rows.append(DryRow(device=parts[0], weights_bytes=weights, kv_bytes=kv, compute_bytes=compute))
    return tuple(rows) if rows and rows[-1].device == "Host" else None


def compared(candidate: Candidate, rows: Sequence[DryRow]) -> list[str]:
    """One sentence per device: what the engine's dry run says beside what the plan says."""
    devices = rows if candidate.cards[0].index == CPU_INDEX else rows[:-1]
    said = []
    for card, row in zip(candidate.cards, devices, strict=False):
        terms = card.terms
        planned = terms.weights_bytes + terms.kv_bytes + terms.compute_bytes
        engine = row.weights_bytes + row.kv_bytes + row.compute_bytes
        verdict = "the upper bound covers it" if engine <= card.total_high_bytes else "MORE than the upper bound"
        said.append(
            f"{BINARY}: {row.device} {format_bytes(engine)} (weights {format_bytes(row.weights_bytes)}, KV "
            f"{format_bytes(row.kv_bytes)}, compute {format_bytes(row.compute_bytes)}), planned "
            f"{format_bytes(planned)}: {verdict}"
        )
    return said
