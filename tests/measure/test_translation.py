"""The three streams on which tools disagree, with each tool's number worked out by hand."""

import pytest

from llamarack.measure.record import ErrorKind
from llamarack.measure.translation import translate
from tests.measure.streams import stream


def _mean(records, tool: str, name: str) -> float | None:
    return next(t.summary.mean for t in translate(records) if (t.tool, t.name) == (tool, name))


def test_plain_stream_guidellm_tpot_includes_the_first_token() -> None:
    records = [stream(*((500 + 20 * i, 1) for i in range(50)), first_event_ms=500, output_tokens=50)]
    assert _mean(records, "vllm bench serve", "TPOT") == pytest.approx(0.020)
    assert _mean(records, "guidellm", "TPOT") == pytest.approx(0.0296)
    assert _mean(records, "LLMPerf", "inter-token latency") == pytest.approx(0.0296)


def test_four_tokens_a_chunk_give_four_different_medians() -> None:
    chunks = [(100 + 80 * i, 4) for i in range(11)]
    records = [stream(*chunks, output_tokens=44)]
    medians = {(t.tool, t.name): t.summary.p50 for t in translate(records)}
    assert medians["vllm bench serve", "ITL"] == pytest.approx(0.080)
    assert medians["sglang bench_serving", "ITL"] == pytest.approx(0.020)
    assert medians["inference-perf", "ITL"] == 0.0
    assert medians["AIPerf", "inter-chunk latency"] == pytest.approx(0.080)


def test_role_event_is_vllms_first_token_but_not_aiperfs() -> None:
    records = [stream((500, 1), (520, 1), first_event_ms=2, output_tokens=2)]
    assert _mean(records, "vllm bench serve", "TTFT") == pytest.approx(0.002)
    assert _mean(records, "AIPerf", "TTFT") == pytest.approx(0.5)


def test_mlperf_counts_from_the_scheduled_time() -> None:
    records = [stream((500, 1), (520, 1), sent_ms=400, output_tokens=2)]
    assert _mean(records, "MLPerf loadgen", "TTFT") == pytest.approx(0.5)
    assert _mean(records, "AIPerf", "TTFT") == pytest.approx(0.1)


def test_trailing_usage_event_lengthens_inference_perfs_time_per_token() -> None:
    records = [stream((100, 1), (200, 1), finished_ms=300, output_tokens=2)]
    assert _mean(records, "inference-perf", "NTPOT") == pytest.approx(0.150)


def test_unknown_counts_and_failures_give_no_value() -> None:
    uncounted = stream((100, None), (120, None))
    failed = stream((1, 1), (2, 1), output_tokens=2, error_kind=ErrorKind.TRUNCATED)
    assert _mean([uncounted, failed], "sglang bench_serving", "ITL") is None
    assert _mean([uncounted, failed], "guidellm", "TPOT") is None
    assert _mean([uncounted, failed], "AIPerf", "TTFT") == pytest.approx(0.1)
