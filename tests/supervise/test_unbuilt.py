"""Nothing in a deployment file is passed over in silence."""

from llamarack.config import parse
from llamarack.supervise.unbuilt import unbuilt_settings

PLAIN = "models: [{name: a, path: a.gguf}]"


def test_defaults_need_no_word() -> None:
    assert unbuilt_settings(parse(PLAIN).deployment) == []


def test_each_setting_without_effect_is_named() -> None:
    text = """
models: [{name: a, path: a.gguf}]
gateway: {routing: session}
"""
    assert "routing" in " ".join(unbuilt_settings(parse(text).deployment))
