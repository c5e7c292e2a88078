"""An engine's /metrics may hold anything: what is no number is not counted, and nothing is raised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.engine import ADAPTORS

NAMES = (
    "llamacpp:tokens_predicted_total",
    "llamacpp:n_decode_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)
VALUES = ("1", "NaN", "+Inf", "-Inf", "1e999", "", "x", "1 1700000000", "\ufffd")
LABELS = ("", "{}", '{engine="0"}', '{block_size="16",num_gpu_blocks="None"}', '{block_size="16')


@pytest.mark.parametrize("name", ["llamacpp", "vllm"])
def test_what_is_no_number_is_not_counted(name: str) -> None:
    counter = {"llamacpp": "llamacpp:tokens_predicted_total", "vllm": "vllm:generation_tokens_total"}[name]
    text = "".join(f'{counter}{{engine="{i}"}} {value}\n' for i, value in enumerate(("3", "NaN", "+Inf", "4")))
    assert ADAPTORS[name].counters(text).generated_tokens == 7
    assert ADAPTORS[name].counters(f"{counter} NaN\n").generated_tokens is None


@given(lines=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(LABELS), st.sampled_from(VALUES)), max_size=8))
def test_nothing_is_raised(lines: list[tuple[str, str, str]]) -> None:
    text = "\n".join(f"{name}{labels} {value}" for name, labels, value in lines)
    for adaptor in ADAPTORS.values():
        adaptor.counters(text)
        adaptor.kv_use(text)
