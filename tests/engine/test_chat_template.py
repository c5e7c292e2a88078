"""Templates by name, rendered in the sandbox that everything renders them in, against the published forms."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamarack.engine.chat_template import known_templates, template_text
from llamarack.engine.llamacpp_options import server_options, worker_parameters
from llamarack.errors import ConfigError
from tests.engine.launching import launch_context

_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def _rendered(name: str, messages: list[dict[str, str]]) -> str:
    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string(template_text(name))
    return template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)


def test_llama_2_is_as_meta_published_it() -> None:
    assert _rendered("llama-2", _TALK) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]"
    )
    assert _rendered("llama2", _TALK[1:2]) == "<s>[INST] Hi [/INST]"


def test_llama_2_refuses_a_role_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="`tool` was given"):
        _rendered("llama-2", [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}])


def test_llama_3_is_as_meta_published_it() -> None:
    assert _rendered("llama-3", _TALK[:2]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_chatml_opens_the_answer() -> None:
    assert _rendered("chatml", _TALK[1:2]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_is_read_and_an_unknown_name_lists_the_known(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }}")
    assert template_text(str(own)) == "{{ messages }}"
    assert known_templates() == ["chatml", "llama-2", "llama-3"]
    with pytest.raises(ConfigError, match="neither a file nor one of chatml, llama-2, llama-3"):
        template_text("lama-2")


def test_llamacpp_gets_the_same_text_and_keeps_its_own_names(tmp_path: Path) -> None:
    def given(name: str) -> object:
        context = launch_context(tmp_path, engine="llamacpp", chat_template=name)
        return worker_parameters(server_options(context), {})["chat_template"]

    assert given("llama-2") == template_text("llama-2")
    assert given("mistral-v7") == "mistral-v7"
