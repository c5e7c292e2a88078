"""A replica as planned, for tests of what an adaptor makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from llamarack.config import parse
from llamarack.engine.adaptor import LaunchContext
from llamarack.plan.record import Candidate, Predicted

_UNKNOWN = Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None)


def launch_context(
    folder: Path, *, cards: tuple[str, ...] = (), plan: dict[str, Any] | None = None, **group: Any
) -> LaunchContext:
    """`group`: keys of the model in the deployment file; `plan`: changes to the candidate."""
    value = {"name": "m", "path": str(folder / "model"), "engine": "vllm", **group}
    model = parse(yaml.safe_dump({"models": [value]}, sort_keys=False)).deployment.models[0]
    candidate = Candidate(
        engine="vllm",
        replicas=1,
        tensor_parallel=model.groups[0].tensor_parallel,
        pipeline_parallel=model.groups[0].pipeline_parallel,
        split_mode=None,
        tensor_split=None,
        fits=True,
        tight=False,
        reasons=(),
        cards=(),
        replica_cards=((),),
        context_tokens=4096,
        sequences=8,
        batch_tokens=2048,
        kv_dtype="f16",
        threads=2,
        max_sequences=None,
        max_context_tokens=None,
        predicted=_UNKNOWN,
        closed_loop=_UNKNOWN,
        kv_cache_bytes=1 << 30,
        gpu_memory_fraction=0.9,
    )
    return LaunchContext(
        replica="m-0",
        model=model,
        group=model.groups[0],
        path=model.path,
        candidate=replace(candidate, **(plan or {})),
        card_uuids=cards,
        files=folder,
        socket=folder / "engine.sock",
        key="the-secret-key",
    )
