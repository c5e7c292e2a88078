"""From a deployment file and what the user allows to the space of a search, and from a trial back to a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, Group, Limits, Model
from llamarack.errors import UsageError
from llamarack.hardware.machine import Card, Machine
from llamarack.measure.engine_defaults import own_limits
from llamarack.measure.tune import FIRST_BATCH_TOKENS, Space, Trial, WeightsSpace
from llamarack.model.spec import ModelFormat, ModelSpec
from llamarack.plan.planner import plan_group

# Of the smallest card: what the next load peak may need must stay free. vLLM takes its planned fraction at once and
# never more, so there is no such ceiling.
MEMORY_CEILING_FRACTION = 0.85
MAX_BATCH_TOKENS = 16384  # this project's own bound on the length of the search
MAX_SEQUENCES_FACTOR = 8  # of the file's
_ENGINE_OF = {ModelFormat.GGUF: "llamacpp", ModelFormat.SAFETENSORS: "vllm"}
_LLAMACPP_ONLY = ("split_mode", "tensor_split", "main_gpu", "gpu_layers", "rpc_servers", "engine_binary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One set of weights and the groups that run it. `own`: limits of each group when the engine decides.
    `fallbacks`: of the model's, those that are still smaller.
    """

    path: Path
    engine: str
    precision: str
    groups: tuple[Group, ...]
    own: tuple[Limits, ...]
    fallbacks: tuple[Path, ...]

    @property
    def memory_ceiling_fraction(self) -> float | None:
        return MEMORY_CEILING_FRACTION if self.engine == "llamacpp" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is tuned. `weights[0]`: the file's own."""

    deployment: Deployment
    model: str
    weights: tuple[Weights, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the user lets the search try. None: the doubling of the search's own; empty contexts: the file's alone."""

    batch_tokens: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    contexts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Other weights of the same model, with the environment of their engine where it must be named."""

    specs: tuple[ModelSpec, ...] = ()
    engine_python: Path | None = None
    engine_binary: Path | None = None


def only_model(deployment: Deployment, model: str | None) -> str:
    """Raises UsageError where it must be named."""
    names = [each.name for each in deployment.models]
    if model is None and len(names) == 1:
        return names[0]
    if model not in names:
        asked = "one must be chosen" if model is None else f"`{model}` is not among them"
        raise UsageError(f"the file has the models {', '.join(names)}; {asked}", hint=f"--model {names[0]}")
    return model


def subject_of(
    deployment: Deployment, name: str, spec: ModelSpec, others: Others, machine: Machine, specs: dict[Path, ModelSpec]
) -> Subject:
    """`spec`: of the file's own weights; `specs`: of the model's fallbacks. Raises UsageError for an engine that has
    nothing to tune and for weights of another model.
    """
    model = _named(deployment, name)
    engines = {group.engine for group in model.groups}
    if engines - {"llamacpp", "vllm"}:
        raise UsageError(
            f"model `{name}`: engine `transformers` has no batch or sequences to tune", hint="engine: vllm"
        )
    if len(engines) > 1 or len({model.path_of(group) for group in model.groups}) > 1:
        raise UsageError(
            f"model `{name}` has groups with different engines or weights, whose goodput would mix",
            hint="a file with one group, and the other weights with --also",
        )
    for other in others.specs:
        _require_same_model(spec, other)
    sets = [_file_weights(model, spec, machine)]
    sets += [_other_weights(model, other, others, machine, specs) for other in others.specs]
    return Subject(deployment=deployment, model=name, weights=tuple(sets))


def space_of(subject: Subject, allowed: Allowed, *, input_tokens: int, output_tokens: int) -> Space:
    """Raises UsageError for a context that the load does not fit in, and for a batch below the sequences of vLLM."""
    weights = subject.weights[0]
    limits = weights.groups[0].limits
    start = Trial(
        batch_tokens=None if limits.batch_tokens == "auto" else limits.batch_tokens,
        sequences=limits.sequences,
        context_tokens=limits.context_tokens,
    )
    for context in (limits.context_tokens, *allowed.contexts):
        if context < input_tokens + output_tokens:
            raise UsageError(
                f"a context of {context} tokens does not hold {input_tokens} + {output_tokens} tokens of the load",
                hint=f"--input-tokens {max(1, context // 2)} --output-tokens {max(1, context // 4)}",
            )
    batches, more, fewer = _batch_ladder(limits), _doubled(limits.sequences), _halved(limits.sequences)
    if allowed.batch_tokens is not None:
        batches = allowed.batch_tokens
    if allowed.sequences is not None:
        more, fewer = allowed.sequences, ()
    return Space(
        start=start,
        batch_tokens=tuple(size for size in batches if size != start.batch_tokens),
        more_sequences=tuple(size for size in more if size != start.sequences),
        fewer_sequences=fewer,
        contexts=tuple(size for size in allowed.contexts if size != start.context_tokens),
        weights=tuple(
            WeightsSpace(engine=each.engine, batch_holds_sequences=each.engine == "vllm") for each in subject.weights
        ),
        is_batch_named=allowed.batch_tokens is not None,
        are_sequences_named=allowed.sequences is not None,
        is_start_own=all(group.limits == own for group, own in zip(weights.groups, weights.own, strict=True)),
    )


def own_sequences(subject: Subject) -> int:
    """Of the file's weights, when the engine decides."""
    return subject.weights[0].own[0].sequences


def deployment_of(subject: Subject, trial: Trial) -> Deployment:
    """The same file with one model's settings replaced."""
    weights = subject.weights[trial.weights]
    pairs = zip(weights.groups, weights.own, strict=True)
    groups = [replace(group, limits=own if trial.is_own else _limits(group.limits, trial)) for group, own in pairs]
    changed: dict[str, Any] = {"groups": groups, "fallbacks": list(weights.fallbacks)}
    models = [replace(each, **changed) if each.name == subject.model else each for each in subject.deployment.models]
    return replace(subject.deployment, models=models)


def _limits(limits: Limits, trial: Trial) -> Limits:
    return replace(
        limits,
        batch_tokens=trial.batch_tokens or "auto",
        sequences=trial.sequences or limits.sequences,
        context_tokens=trial.context_tokens or limits.context_tokens,
    )


def _named(deployment: Deployment, name: str) -> Model:
    return next(each for each in deployment.models if each.name == name)


def _file_weights(model: Model, spec: ModelSpec, machine: Machine) -> Weights:
    return Weights(
        path=model.path_of(model.groups[0]),
        engine=model.groups[0].engine,
        precision=spec.quantization.label,
        groups=tuple(model.groups),
        own=_own(model.groups, machine, spec),
        fallbacks=tuple(model.fallbacks),
    )


def _other_weights(
    model: Model, spec: ModelSpec, others: Others, machine: Machine, specs: dict[Path, ModelSpec]
) -> Weights:
    engine = _ENGINE_OF[spec.format]
    groups = [_moved(group, spec, engine, others) for group in model.groups]
    kept = [
        path
        for path in model.fallbacks
        if path in specs and specs[path].format is spec.format and specs[path].weights_bytes < spec.weights_bytes
    ]
    return Weights(
        path=spec.path,
        engine=engine,
        precision=spec.quantization.label,
        groups=tuple(groups),
        own=_own(groups, machine, spec),
        fallbacks=tuple(kept),
    )


def _moved(group: Group, spec: ModelSpec, engine: str, others: Others) -> Group:
    """The group on other weights. What only its old engine understands is left to the new one's defaults."""
    path = spec.path.absolute()
    if engine == group.engine:
        return replace(group, path=path)
    update: dict[str, Any] = {"engine": engine, "path": path, "engine_args": {}, "env": {}, "engine_python": None}
    as_left_out = Group()
    update |= {name: getattr(as_left_out, name) for name in _LLAMACPP_ONLY}
    update |= {"tensor_parallel": 1, "pipeline_parallel": 1}
    plain = Limits()
    limits = replace(group.limits, kv_dtype=plain.kv_dtype, kv_unified=False, kv_cache_bytes=plain.kv_cache_bytes)
    if engine == "vllm":
        update |= {"engine_python": others.engine_python}
        cards = group.gpu_lists()
        update |= {"tensor_parallel": max(1, len(cards[0])) if cards else 1}
    else:
        update |= {"engine_binary": others.engine_binary}
    return replace(group, **update, limits=limits)


def _own(groups: Sequence[Group], machine: Machine, spec: ModelSpec) -> tuple[Limits, ...]:
    return tuple(_fitted(group, own_limits(group, _cards(group, machine), spec.context_train_tokens), machine, spec)
                 for group in groups)  # fmt: skip


def _fitted(group: Group, own: Limits, machine: Machine, spec: ModelSpec) -> Limits:
    """llama-server cuts the model's own context to what its memory holds (`--fit`)."""
    if group.engine != "llamacpp":
        return own
    candidate = plan_group(spec, replace(group, limits=own), machine, model_name="")
    if candidate.fits or not candidate.max_context_tokens:
        return own
    return replace(own, context_tokens=min(own.context_tokens, candidate.max_context_tokens))


def _cards(group: Group, machine: Machine) -> list[Card]:
    lists = group.gpu_lists()
    if lists is None:
        return list(machine.cards)
    return [card for card in machine.cards if card.index in lists[0] or card.uuid in lists[0]]


def _require_same_model(spec: ModelSpec, other: ModelSpec) -> None:
    for name in ("layers", "hidden_size", "attention_heads", "kv_heads"):
        mine, its = getattr(spec, name), getattr(other, name)
        if mine != its:
            shown = [value if isinstance(value, int) else max(value) for value in (mine, its)]
            raise UsageError(
                f"`--also {other.path}` is another model: {name} {shown[1]}, the file's has {shown[0]}",
                hint="name another quantisation of the same model, or the same model in another format",
            )


def _batch_ladder(limits: Limits) -> tuple[int, ...]:
    """More than all sequences hold is never filled."""
    most = min(MAX_BATCH_TOKENS, limits.context_tokens * limits.sequences)
    ladder = [FIRST_BATCH_TOKENS]
    while ladder[-1] * 2 <= most:
        ladder.append(ladder[-1] * 2)
    return tuple(ladder)


def _doubled(sequences: int) -> tuple[int, ...]:
    factors = [2**step for step in range(1, MAX_SEQUENCES_FACTOR.bit_length())]
    return tuple(sequences * factor for factor in factors)


def _halved(sequences: int) -> tuple[int, ...]:
    found = []
    while sequences > 1:
        sequences //= 2
        found.append(sequences)
    return tuple(found)
