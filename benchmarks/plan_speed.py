"""How long does a plan of 8 cards take, all candidates counted? CPU time, best of 5.

python benchmarks/plan_speed.py
"""

from __future__ import annotations

from time import process_time

from llamarack.plan.catalogue import machine_of
from llamarack.plan.planner import plan_model
from llamarack.plan.record import Load
from llamarack.plan.reference import LLAMA2, gguf_spec, safetensors_spec

_BOUND_S = 1.0
_CASES = {
    "7B, three files, H200 x8": ("7B", "H200 x8", 64),
    "70B, three files, A100-80 x4 + RTX 4090 x4": ("70B", "A100-80 x4 + RTX 4090 x4", 16),
    "70B, three files, T4 x8 (nothing fits)": ("70B", "T4 x8", 64),
}


def main() -> None:
    for name, (size, gpus, concurrency) in _CASES.items():
        dimensions = LLAMA2[size]
        files = [gguf_spec(dimensions, "Q8_0"), gguf_spec(dimensions, "Q4_K_M"), safetensors_spec(dimensions, "f16")]
        machine = machine_of(gpus)
        load = Load(context_tokens=4096, concurrency=concurrency)
        spent = []
        for _ in range(5):
            start = process_time()
            plan = plan_model(files[0], machine, load, model_name=size, others=files[1:])
            spent.append(process_time() - start)
        verdict = "ok" if min(spent) < _BOUND_S else f"over {_BOUND_S} s"
        print(f"{name}: {len(plan.candidates)} candidates in {min(spent):.2f} s: {verdict}")


if __name__ == "__main__":
    main()
