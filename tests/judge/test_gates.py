"""The gates file: what is accepted, what is refused and in which words."""

import pytest

from llamarack.errors import ConfigError
from llamarack.judge.gates import TEMPLATES, load_gates, parse_gates


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_is_a_gates_file(name: str) -> None:
    assert load_gates(name).gates


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gates: []", "`gates`"),
        ("gates:\n  - {metric: ttft, max: 1}", "`gates[0].metric`"),
        ("gates:\n  - {metric: failures_fraction}", "no rule given"),
        ("gates:\n  - {metric: failures_fraction, max: 1, min: 0}", "max and min given"),
        ("gates:\n  - {max: 1}", "exclude each other, and one is needed"),
        ("gates:\n  - {metric: failures_fraction, consistency: [SAME]}", "exclude each other"),
        ("gates:\n  - {metric: failures_fraction, maximum: 1}", "`gates[0].maximum`"),
        ("confidence: 1.0\ngates:\n  - {metric: failures_fraction, max: 1}", "`confidence`"),
        ("schema_version: 2\ngates:\n  - {metric: failures_fraction, max: 1}", "`schema_version`"),
        ("- 1", "holds no mapping"),
        ("a: [", "`g.yaml` line 1"),
    ],
)
def test_fault_is_named_with_its_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gates(text, source="g.yaml")
    assert said in caught.value.message
    assert "g.yaml" in caught.value.message


def test_missing_file_names_the_templates() -> None:
    with pytest.raises(ConfigError) as caught:
        load_gates("/nowhere/gates.yaml")
    assert "default" in (caught.value.hint or "")


def test_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gates("gates:\n  - {metric: ttft, max: 1}", source="g")
    assert "first_token_p50_s" in (caught.value.hint or "")
