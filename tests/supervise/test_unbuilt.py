"""Nothing in a deployment file is passed over in silence."""

from llamarack.config import parse
from llamarack.supervise.unbuilt import unbuilt_settings

PLAIN = "models: [{name: a, path: a.gguf}]"


def test_defaults_need_no_word() -> None:
    assert unbuilt_settings(parse(PLAIN).deployment) == []


def test_each_setting_without_effect_is_named() -> None:
    text = """
models: [{name: a, path: a.gguf}]
supervise: {webhook: "http://127.0.0.1/hook", sample_s: 1}
"""
    told = " ".join(unbuilt_settings(parse(text).deployment))
    for name in ("webhook", "sample_s"):
        assert name in told
