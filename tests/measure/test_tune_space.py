"""What a search may try of a file, and that each of it is a deployment that the plan takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.config import Deployment, parse, to_yaml
from llamarack.errors import UsageError
from llamarack.hardware.machine import Machine
from llamarack.measure.tune import Trial, explore
from llamarack.measure.tune_space import (
    Allowed,
    Others,
    Subject,
    deployment_of,
    only_model,
    own_sequences,
    space_of,
    subject_of,
)
from llamarack.model.spec import ModelSpec
from llamarack.plan.planner import plan_group
from llamarack.plan.reference import gguf_spec, safetensors_spec
from tests.measure.test_tune import seen
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, SMOLLM2, card, h200, machine

Q8 = replace(gguf_spec(LLAMA2_7B, "Q8_0"), path=Path("/q8.gguf"))
Q4 = replace(gguf_spec(LLAMA2_7B, "Q4_K_M"), path=Path("/q4.gguf"))
F16 = replace(safetensors_spec(LLAMA2_7B, "f16"), path=Path("/llama-2-7b"))
LOAD = {"input_tokens": 256, "output_tokens": 128}


def deployment(path: str = "/q8.gguf", **group: object) -> Deployment:
    limits = {"sequences": 8, "context_tokens": 4096, **group.pop("limits", {})}  # type: ignore[dict-item]
    model = {"name": "m", "path": path, "limits": limits, **group}
    return parse(str({"schema_version": 1, "models": [model]})).deployment


def subject(
    file: Deployment,
    spec: ModelSpec | None = None,
    *others: ModelSpec,
    on: Machine | None = None,
    specs: dict[Path, ModelSpec] | None = None,
    **more: Path,
) -> Subject:
    spec = spec or gguf_spec(SMOLLM2, "Q4_1")
    return subject_of(file, "m", spec, Others(specs=others, **more), on or machine(), specs or {})


def group_of(file: Deployment):
    return file.models[0].groups[0]


def test_own_settings_of_llamacpp_are_four_slots_that_share_the_models_context() -> None:
    given = subject(deployment(limits={"kv_dtype": "q8_0", "batch_tokens": 1024, "context_tokens": 2048}), Q8)
    own = group_of(deployment_of(given, Trial(is_own=True))).limits
    assert (own.sequences, own.kv_unified, own.context_tokens, own.batch_tokens) == (4, True, 4096, "auto")
    assert own.kv_dtype == "q8_0"  # the precision is the file's
    assert own_sequences(given) == 4


@pytest.mark.parametrize(
    ("cards", "sequences"),
    [
        ([h200()], 1024),
        ([card(0, "NVIDIA A100-SXM4-80GB", 81920)], 256),
        ([card(0, "NVIDIA GeForce RTX 4090", 24564)], 256),
        ([card(0, "NVIDIA B200", 183359)], 1024),
        ([], 128),
    ],
)
def test_own_settings_of_vllm_go_by_the_card(cards: list, sequences: int) -> None:
    file = deployment("/llama-2-7b", engine="vllm", limits={"kv_cache_bytes": 2**30, "gpu_memory_fraction": 0.5})
    own = group_of(deployment_of(subject(file, F16, on=machine(*cards)), Trial(is_own=True))).limits
    assert own.sequences == sequences
    assert (own.kv_cache_bytes, own.gpu_memory_fraction) == ("auto", 0.92)
    assert own.batch_tokens == ("auto" if cards else 2048)  # `auto` is vLLM's own, by card


def test_own_settings_of_vllm_on_the_processor_are_per_rank() -> None:
    file = deployment("/llama-2-7b", engine="vllm", tensor_parallel=2, gpus=[], limits={"context_tokens": 1024})
    own = group_of(deployment_of(subject(file, F16), Trial(is_own=True))).limits
    assert (own.sequences, own.batch_tokens, own.context_tokens) == (256, 4096, 1024)


def test_own_context_of_llamacpp_is_cut_to_what_the_card_holds() -> None:
    on = machine(card(0, "NVIDIA GeForce RTX 3060", 9 * 1024))
    group = group_of(deployment_of(subject(deployment(gpus=[0]), Q8, on=on), Trial(is_own=True)))
    assert 256 <= group.limits.context_tokens < 4096
    assert plan_group(Q8, group, on, model_name="m").fits


def test_trial_sets_the_limits_and_nothing_else() -> None:
    file = deployment(engine_args={"n_threads": 3}, limits={"kv_dtype": "q8_0"})
    tried = deployment_of(subject(file, Q8), Trial(batch_tokens=1024, sequences=16, context_tokens=2048))
    limits = group_of(tried).limits
    assert (limits.batch_tokens, limits.sequences, limits.context_tokens) == (1024, 16, 2048)
    same = replace(group_of(tried), limits=group_of(file).limits)
    assert same == group_of(file)
    assert parse(to_yaml(tried)).deployment == tried


def test_start_is_the_file_itself() -> None:
    file = deployment(limits={"batch_tokens": 512})
    given = subject(file, Q8)
    assert deployment_of(given, space_of(given, Allowed(), **LOAD).start) == file


def test_other_models_of_the_file_stay() -> None:
    text = "{schema_version: 1, models: [{name: m, path: /a.gguf}, {name: other, path: /b.gguf}]}"
    file = parse(text).deployment
    assert deployment_of(subject(file, Q8), Trial(sequences=2)).models[1] == file.models[1]


def test_batches_double_to_what_all_sequences_hold() -> None:
    given = subject(deployment(limits={"sequences": 2, "context_tokens": 512}), Q8)
    assert space_of(given, Allowed(), **LOAD).batch_tokens == (128, 256, 512, 1024)
    large = space_of(subject(deployment(), Q8), Allowed(), **LOAD)
    assert large.batch_tokens[-1] == 16384
    assert large.more_sequences == (16, 32, 64)
    assert large.fewer_sequences == (4, 2, 1)


def test_named_values_are_the_space() -> None:
    allowed = Allowed(batch_tokens=(512, 2048), sequences=(4, 8, 12), contexts=(1024, 4096))
    space = space_of(subject(deployment(limits={"batch_tokens": 512}), Q8), allowed, **LOAD)
    assert (space.batch_tokens, space.more_sequences, space.contexts) == ((2048,), (4, 12), (1024,))
    assert space.fewer_sequences == ()


def test_context_must_hold_the_load() -> None:
    given = subject(deployment(limits={"context_tokens": 512}), Q8)
    with pytest.raises(UsageError, match="a context of 512 tokens does not hold 400 \\+ 128"):
        space_of(given, Allowed(), input_tokens=400, output_tokens=128)
    with pytest.raises(UsageError, match="a context of 300 tokens"):
        space_of(given, Allowed(contexts=(300,)), **LOAD)


def test_file_with_the_engines_own_settings_is_seen_as_such() -> None:
    own = deployment(limits={"sequences": 4, "kv_unified": True, "context_tokens": 4096})
    assert space_of(subject(own, Q8), Allowed(), **LOAD).is_start_own
    assert not space_of(subject(deployment(), Q8), Allowed(), **LOAD).is_start_own


def test_other_quantisation_keeps_the_settings_and_the_fallbacks_that_are_still_smaller() -> None:
    file = deployment(fallbacks=["/q4.gguf", "/q4_0.gguf"], split_mode="none")
    tiny = replace(gguf_spec(LLAMA2_7B, "Q4_0"), path=Path("/q4_0.gguf"))
    given = subject(file, Q8, Q4, specs={Path("/q4.gguf"): Q4, Path("/q4_0.gguf"): tiny})
    tried = deployment_of(given, Trial(sequences=8, context_tokens=4096, weights=1)).models[0]
    assert tried.groups[0].path == Path("/q4.gguf")
    assert tried.groups[0].split_mode == "none"
    assert tried.fallbacks == [Path("/q4_0.gguf")]
    assert given.weights[1].precision == "Q4_K_M"


def test_other_format_brings_its_engine_and_drops_what_only_the_old_one_knows() -> None:
    file = deployment(gpus=[[0, 1]], tensor_split=[0.5, 0.5], engine_args={"n_threads": 3}, limits={"kv_dtype": "q8_0"})
    on = machine(h200(0), h200(1))
    given = subject(file, Q8, F16, on=on, engine_python=Path("/venv/bin/python"))
    group = group_of(deployment_of(given, Trial(sequences=8, context_tokens=4096, weights=1)))
    assert (group.engine, group.engine_python, group.tensor_parallel) == ("vllm", Path("/venv/bin/python"), 2)
    assert (group.tensor_split, group.engine_args, group.limits.kv_dtype) == ("auto", {}, "f16")
    assert given.weights[1].memory_ceiling_fraction is None
    assert given.weights[0].memory_ceiling_fraction == 0.85


def test_weights_of_another_model_are_refused() -> None:
    other = gguf_spec(LLAMA2_13B, "Q4_K_M")
    with pytest.raises(UsageError, match="is another model: layers 40, the file's has 32"):
        subject(deployment(), Q8, other)


def test_engine_without_batches_and_mixed_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="has no batch or sequences to tune"):
        subject(deployment("/llama-2-7b", engine="transformers"), F16)
    mixed = parse(
        "{schema_version: 1, models: [{name: m, path: /q8.gguf, groups: [{gpus: [0]}, {engine: vllm, path: /x}]}]}"
    ).deployment
    with pytest.raises(UsageError, match="whose goodput would mix"):
        subject(mixed, Q8)


def test_model_must_be_named_where_the_file_has_several() -> None:
    file = deployment()
    assert only_model(file, None) == "m"
    two = replace(file, models=[file.models[0]] * 2)
    with pytest.raises(UsageError, match="one must be chosen"):
        only_model(two, None)
    with pytest.raises(UsageError, match="not among them"):
        only_model(file, "x")


@pytest.mark.parametrize(
    ("spec", "group", "too_large"),
    [
        (F16, {"path": "/llama-2-7b", "engine": "vllm", "gpus": [0], "limits": {"sequences": 256}}, []),
        # llama.cpp reserves the cache of every slot: 128 of 4096 tokens are 256 GiB.
        (Q8, {"path": "/q8.gguf", "gpus": [0], "limits": {"sequences": 16}}, [128]),
    ],
)
def test_trials_of_a_7b_model_fit_one_h200(spec: ModelSpec, group: dict, too_large: list[int]) -> None:
    on = machine(h200())
    given = subject(deployment(**group), spec, on=on)
    steps = explore(space_of(given, Allowed(), **LOAD))
    trial: Trial | None = next(steps)
    tried, refused = [], []
    while trial is not None:
        candidate = plan_group(spec, group_of(deployment_of(given, trial)), on, model_name="m", engine_version="0.25.1")
        tried.append(trial)
        if not candidate.fits:
            refused.append(trial.sequences)
        try:
            trial = steps.send(seen(trial, 1.0 + len(tried), is_full=not candidate.fits))
        except StopIteration:
            trial = None
    assert tried[0].is_own
    assert refused == too_large
    assert {1024, 2048} <= {trial.batch_tokens for trial in tried}
    assert max(trial.sequences or 0 for trial in tried) == 8 * (tried[1].sequences or 0)
