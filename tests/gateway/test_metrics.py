from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llamarack.gateway.metrics import merged, with_labels
from tests.gateway.raw import ask, chat, get
from tests.rigs import fake_engine, gateway_worker


def families(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


ENGINE_TEXT = """# HELP vllm:e2e_seconds a histogram
# TYPE vllm:e2e_seconds histogram
vllm:e2e_seconds_bucket{le="1.0",model_name="m"} 3.0
vllm:e2e_seconds_bucket{le="+Inf",model_name="m"} 4.0
vllm:e2e_seconds_sum{model_name="m"} 5.5
vllm:e2e_seconds_count{model_name="m"} 4.0
# TYPE bare gauge
bare 1e-3
empty{} 2
broken line
"""


def test_engine_samples_keep_their_values_and_gain_model_and_replica() -> None:
    strange = 'a "b" \\ c'
    parts = [with_labels(ENGINE_TEXT, {"model": strange, "replica": id}) for id in ("r-0", "r-1")]
    found = families(merged(parts))
    for name, values in families(ENGINE_TEXT.replace("broken line\n", "")).items():
        both = [
            ({**labels, "model": strange, "replica": id}, value) for id in ("r-0", "r-1") for labels, value in values
        ]
        assert sorted(found[name], key=str) == sorted(both, key=str)
    assert merged(parts).count("# TYPE vllm:e2e_seconds histogram") == 1


@pytest.mark.process
async def test_metrics_of_gateway_and_engines_parse_and_count_what_was_asked(tmp_path: Path) -> None:
    async with (
        fake_engine(tmp_path, "a") as a,
        fake_engine(tmp_path, "b", flavor="vllm") as b,
        gateway_worker(tmp_path, [a.row(), b.row()]) as gateway,
    ):
        for stream in (True, False):
            await ask(gateway, "/v1/chat/completions", chat(stream=stream, max_tokens=3))
        prompt = "[[fault usage_with_finish]]"
        await ask(gateway, "/v1/completions", {"prompt": prompt, "stream": True, "max_tokens": 3})
        await ask(gateway, "/v1/chat/completions", chat("[[fault refuse=400]]"))
        answer = await get(gateway, "/metrics")
        b.kill()
        without = families((await get(gateway, "/metrics")).body.decode())
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = families(answer.body.decode())
    assert ({"model": "fake", "code": "200"}, 3.0) in found["llamarack_requests_total"]
    assert ({"model": "fake", "code": "400"}, 1.0) in found["llamarack_requests_total"]
    assert found["llamarack_generated_tokens_total"] == [({"model": "fake"}, 9.0)]
    assert found["llamarack_first_token_seconds_count"] == [({"model": "fake"}, 2.0)]
    assert found["llamarack_per_token_seconds_count"] == [({"model": "fake"}, 2.0)]
    ready = [({"model": "fake", "replica": "a"}, 1.0), ({"model": "fake", "replica": "b"}, 1.0)]
    assert found["llamarack_replica_ready"] == ready
    assert [labels["replica"] for labels, _ in found["llamacpp:tokens_predicted_total"]] == ["a"]
    (labels, _), = found["vllm:generation_tokens_total"]  # fmt: skip
    assert labels == {"engine": "0", "model_name": "fake", "model": "fake", "replica": "b"}
    assert "vllm:generation_tokens_total" not in without  # a dead engine does not spoil the page
    assert "llamacpp:tokens_predicted_total" in without
