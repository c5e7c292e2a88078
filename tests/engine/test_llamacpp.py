"""What the built-in worker is given, and what is refused before a start."""

from pathlib import Path

import pytest

from llamarack.config import Group, parse
from llamarack.engine.llamacpp import LlamaCpp
from llamarack.errors import ConfigError


def _group(more: str) -> Group:
    return parse(f"models: [{{name: a, path: a.gguf, {more}}}]").deployment.models[0].groups[0]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("engine_args: {n_ctx: 100}", "engine_args.n_ctx"),
        ("engine_binary: /opt/llama-server", "engine_binary"),
        ('rpc_servers: ["127.0.0.1:50052"]', "rpc_servers"),
    ],
)
def test_setting_that_would_part_plan_and_engine_is_refused_by_name(more: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LlamaCpp().prepare(_group(more), on_cards=False)


def test_plain_group_is_accepted() -> None:
    LlamaCpp().prepare(_group("engine_args: {slot_prompt_similarity: 0.2}"), on_cards=False)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 99", "out_of_memory"),
        ("CUDA error: out of memory", "out_of_memory"),
        ("llama_model_load: error loading model: tensor 'x' data is not within the file bounds", "model_file_damaged"),
        ("llama_model_load: error loading model: unknown model architecture: 'mamba9'", "unsupported_architecture"),
        ("llamarack worker: engine_args.n_foo is no option of this llama.cpp; near: n_gpu", "bad_option"),
        ("something unheard of", "unrecognised"),
    ],
)
def test_cause_is_read_from_the_log(line: str, cause: str) -> None:
    found = LlamaCpp().diagnose("exit code 1", ["noise", line, "noise"])
    assert found.cause == cause
    if cause == "bad_option":
        assert "n_foo" in found.message
    if cause == "unrecognised":
        assert "exit code 1" in found.message


def test_worker_file_is_shipped_and_imports_nothing_of_ours() -> None:
    import llamarack.engine.llamacpp as adaptor

    worker = Path(adaptor.__file__).with_name("llamacpp_worker.py")
    assert "llamarack." not in "".join(line for line in worker.read_text().splitlines() if "import" in line)
