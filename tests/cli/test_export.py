"""The exported settings use the keys of the examples, which say the same in YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarack.cli.export import SpringAi, spring_properties
from llamarack.config import parse
from llamarack.errors import UsageError

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
