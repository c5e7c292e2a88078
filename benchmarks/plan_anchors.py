"""How far is the speed model from what was measured? Prints the error of every anchor, in sample or held out.

python benchmarks/plan_anchors.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from llamarack.plan.catalogue import machine_of
from llamarack.plan.record import Load
from llamarack.plan.reference import LLAMA2, gguf_spec, safetensors_spec
from llamarack.plan.shape import shape_of
from llamarack.plan.speed import Placed, engine_times, predict

_FILE = Path(__file__).with_name("plan_anchors.yaml")
_MEASURES = ("decode", "throughput", "total", "first_ms", "kernels")
# The kernel tables' own contexts, by streams.
_KERNEL_CONTEXT_TOKENS = {1: 512, 32: 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """`error`: predicted over measured, less 1."""

    id: str
    measure: str
    concurrency: int
    is_fitted: bool
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def errors() -> Iterator[Error]:
    for row in yaml.safe_load(_FILE.read_text(encoding="utf-8"))["rows"]:
        for measure in _MEASURES:
            for concurrency, measured in row.get(measure, {}).items():
                yield Error(
                    id=row["id"],
                    measure=measure,
                    concurrency=concurrency,
                    is_fitted=row.get("fitted", False),
                    measured=measured,
                    predicted=_predicted(row, measure, concurrency),
                )


def _predicted(row: dict[str, Any], measure: str, concurrency: int) -> float:
    make = safetensors_spec if row["engine"] == "vllm" else gguf_spec
    cards = machine_of(row["gpus"]).cards
    prompt = row.get("input") or _KERNEL_CONTEXT_TOKENS[concurrency] - 1
    output = row.get("output") or 2
    one_by_one = row.get("split") == "layer"
    placed = Placed(
        engine=row["engine"],
        stages=tuple(((card,), 1 / len(cards)) for card in cards) if one_by_one else ((cards, 1.0),),
        batch_tokens=8192 if row["engine"] == "vllm" else 512,
        kv_element_bytes=2.0,
        engine_version=row.get("version"),
    )
    load = Load(context_tokens=4096, concurrency=concurrency, input_tokens=prompt, output_tokens=output)
    found = predict(shape_of(make(LLAMA2[row["model"]], row["weights"])), placed, load, concurrency)
    assert found.per_token_s is not None
    assert found.first_token_s is not None
    assert found.tokens_per_s is not None
    times = engine_times(row["engine"], row.get("version"))
    assert times is not None
    own_s = (times.step_us + concurrency * times.request_us) * 1e-6
    return {
        "decode": 1 / found.per_token_s,
        "throughput": found.tokens_per_s,
        "total": found.tokens_per_s * (prompt + output) / output,
        "first_ms": found.first_token_s * 1000,
        "kernels": concurrency / (found.per_token_s - own_s),
    }[measure]


def main() -> None:
    found = list(errors())
    print(f"{'anchor':28}{'measure':12}{'at once':>8}{'measured':>11}{'predicted':>11}{'error':>9}")
    for one in found:
        kind = "in sample" if one.is_fitted else "held out"
        numbers = f"{one.measured:11,.1f}{one.predicted:11,.1f}{one.error:+9.1%}"
        print(f"{one.id:28}{one.measure:12}{one.concurrency:8}{numbers}  {kind}")
    for is_fitted, name in ((True, "in sample"), (False, "held out")):
        sizes = sorted(abs(one.error) for one in found if one.is_fitted is is_fitted)
        print(f"{name}: {len(sizes)} anchors, median {median(sizes):.1%}, largest {sizes[-1]:.1%}")


if __name__ == "__main__":
    main()
