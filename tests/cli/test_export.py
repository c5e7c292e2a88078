"""The exported settings use the keys of the examples, which say the same in YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from llamarack.cli.export import SpringAi, app, spring_properties
from llamarack.config import parse
from llamarack.errors import UsageError
from tests.huggingface_files import write_tiny_huggingface

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO = "models: [{name: a, path: a.gguf}, {name: b, path: b.gguf, defaults: {max_tokens: 99}}]"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf for name, part in value.items() for key, leaf in _flat(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def _properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize(("version", "folder"), [(SpringAi.V1, "spring-ai-1"), (SpringAi.V2, "spring-ai-2")])
def test_keys_are_those_of_the_example(version: SpringAi, folder: str) -> None:
    (example,) = (EXAMPLES / folder).rglob("application.yml")
    known = _flat(yaml.safe_load(example.read_text()))
    written = _properties(spring_properties(parse(TWO).deployment, None, version))
    assert set(written) <= set(known)
    base = known["spring.ai.openai.base-url"]
    assert written["spring.ai.openai.base-url"].endswith("/v1") == base.endswith("/v1")


def test_address_model_and_key_come_from_the_file() -> None:
    text = TWO + "\ngateway: {host: 0.0.0.0, port: 9000, api_keys_file: k.yaml, tls_cert: c.pem, tls_key: k.pem}"
    written = _properties(spring_properties(parse(text).deployment, "b", SpringAi.V2))
    assert written["spring.ai.openai.base-url"] == "https://127.0.0.1:9000/v1"
    assert written["spring.ai.openai.chat.model"] == "b"
    assert written["spring.ai.openai.chat.max-tokens"] == "99"
    assert written["spring.ai.openai.api-key"] == "${LLAMARACK_API_KEY}"  # no default where keys are needed
    assert written["spring.ai.openai.timeout"] == "600s"


def test_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--model c"):
        spring_properties(parse(TWO).deployment, "c", SpringAi.V2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("systemd", "--run-as", "a user"), "`--run-as a user`"),
        (("systemd", "--run-as", "x\nExecStartPre=/bin/sh"), "is not the name of a user"),
        (("compose", "--image", "an image"), "`--image an image`"),
        (("kubernetes", "--image", "x\n  command: [sh]"), "is not the name of an image"),
    ],
)
def test_name_that_would_write_more_than_a_name_is_refused(tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    model = write_tiny_huggingface(tmp_path / "m")
    file = tmp_path / "rack.yaml"
    file.write_text(f"models: [{{name: m, path: {model}, engine: vllm}}]\ngateway: {{insecure: true}}\n")
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, [words[0], str(file), *words[1:]], catch_exceptions=False)
    assert named in caught.value.message
