"""The fake engine behind the same contract as real ones, so that real keepers and the real supervisor run it.

spec = fake_spec("fake-0", tmp_path, load_s=0.5, crash_after=3)     # faults by the names of fake_engine.Faults
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, Group, parse
from llamarack.engine.adaptor import Diagnosis, Launch, LaunchContext
from llamarack.engine.device_memory import DeviceTerms
from llamarack.engine.dialect import Counters, Deviations, Endpoint, KvUse
from llamarack.engine.llamacpp import KEY_VARIABLE, LlamaCpp
from llamarack.environment import engine_environment
from llamarack.plan.record import Candidate, CardPlan, Predicted, Terms
from llamarack.supervise.replica_record import ReplicaSpec

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
_MIB = 1024**2


class FakeEngine:
    """llama.cpp's deviations, log lines and metric names; `group.engine_args` become the fake's flags."""

    name = "llamacpp"
    deviations: Deviations = LlamaCpp.deviations

    def prepare(self, group: Group, *, on_cards: bool) -> None:
        pass

    def launch(self, context: LaunchContext) -> Launch:
        candidate = context.candidate
        argv = [
            *(sys.executable, "-I", "-S", str(FAKE_ENGINE), "--socket", str(context.socket)),
            *("--model", context.model.name, "--slots", str(candidate.sequences)),
            *("--context-tokens", str(candidate.context_tokens)),
            *("--batch-tokens", str(candidate.batch_tokens), "--model-path", str(context.path)),
            *flags(context.group.engine_args),
        ]
        return Launch(
            argv=argv,
            env=engine_environment(os.environ, context.card_uuids, {**context.group.env, KEY_VARIABLE: context.key}),
            endpoint=Endpoint(socket=context.socket, port=None, key=context.key, served_name=context.model.name),
        )

    def diagnose(self, exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
        return LlamaCpp().diagnose(exit_words, log_tail)

    def load_fraction(self, log_tail: Sequence[str]) -> float | None:
        return None

    def counters(self, metrics_text: str) -> Counters:
        return LlamaCpp().counters(metrics_text)

    def require_planned(self, candidate: Candidate, group: Group, log_lines: Sequence[str]) -> None:
        pass

    def build(self, group: Group, *, on_cards: bool) -> str | None:
        return None

    def kv_use(self, metrics_text: str) -> KvUse | None:
        return None

    def device_terms(self, log_lines: Sequence[str]) -> Sequence[DeviceTerms]:
        return ()


def flags(words: Mapping[str, Any]) -> list[str]:
    """`{"crash_after": 3, "no_done": True}` as the fake engine's command line."""
    out: list[str] = []
    for name, value in words.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            out.append(flag)
        elif value is not None and value is not False:
            out += [flag, str(value)]
    return out


def fake_spec(
    id: str,
    folder: Path,
    *,
    model: str = "fake",
    slots: int = 4,
    context_tokens: int = 100_000,
    start_deadline_s: float = 20.0,
    on_out_of_memory: str = "degrade",
    fallbacks: Sequence[Path] = (),
    **faults: Any,
) -> ReplicaSpec:
    """A replica of the fake engine on the CPU, complete. `folder`: where its model file is made; faults by name."""
    path = folder / f"{model}.gguf"
    if not path.exists():
        path.write_bytes(b"GGUF")
    # JSON is YAML; engine_args travel as the deployment file would carry them.
    group = {"replicas": 1, "gpus": [], "limits": {"context_tokens": context_tokens, "sequences": slots}}
    memory = {"on_out_of_memory": on_out_of_memory, "fallbacks": [str(each) for each in fallbacks]}
    text = json.dumps({"models": [{"name": model, "path": str(path), **group, **memory, "engine_args": faults}]})
    row = parse(text).deployment.models[0]
    return ReplicaSpec(
        id=id,
        model=row,
        group=row.groups[0],
        path=path,
        candidate=fake_candidate(slots, context_tokens),
        card_uuids=(),
        adaptor=FakeEngine(),
        has_template=True,
        start_deadline_s=start_deadline_s,
        fingerprint=f"fake {model} {sorted(faults.items())}",
    )


def fake_plan_again(
    deployment: Deployment,
    was: ReplicaSpec,
    group: Group,
    path: Path,
    waiting: Sequence[ReplicaSpec],
    own: Mapping[int, int],
) -> ReplicaSpec:
    """The planner of a rack of fakes: takes the limits as they are."""
    limits = group.limits
    batch = 512 if limits.batch_tokens == "auto" else limits.batch_tokens
    return replace(
        was, group=group, path=path, candidate=fake_candidate(limits.sequences, limits.context_tokens, batch)
    )


def fake_candidate(slots: int, context_tokens: int, batch_tokens: int = 512) -> Candidate:
    card = CardPlan(
        index=-1,
        name="CPU",
        uuid=None,
        memory_total_bytes=1024 * _MIB,
        memory_free_bytes=1024 * _MIB,
        terms=Terms(),
        total_bytes=64 * _MIB,
        total_high_bytes=64 * _MIB,
        free_after_bytes=960 * _MIB,
    )
    return Candidate(
        engine="llamacpp",
        replicas=1,
        tensor_parallel=1,
        pipeline_parallel=1,
        split_mode=None,
        tensor_split=None,
        fits=True,
        tight=False,
        reasons=(),
        cards=(card,),
        replica_cards=((),),
        context_tokens=context_tokens,
        sequences=slots,
        batch_tokens=batch_tokens,
        kv_dtype="f16",
        threads=1,
        max_sequences=slots,
        max_context_tokens=context_tokens,
        predicted=Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None),
        closed_loop=Predicted(first_token_s=None, per_token_s=None, tokens_per_s=None),
    )
