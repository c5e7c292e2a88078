"""Counters as the engines print them."""

from llamarack.measure.counters import CounterSample, parse_counters, summarize_counters

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 5.0
"""
LLAMA_CPP = """# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""


def test_vllm_counters_are_summed_over_replicas_and_the_fullest_cache_counts() -> None:
    sample = parse_counters(VLLM, 7)
    assert sample is not None
    assert (sample.at_monotonic_ns, sample.running, sample.waiting) == (7, 7.0, 2.0)
    assert (sample.kv_fraction, sample.preemptions, sample.output_tokens) == (0.75, 5.0, None)


def test_llama_cpp_counters_are_known_by_its_names() -> None:
    sample = parse_counters(LLAMA_CPP, 0)
    assert sample is not None
    assert (sample.running, sample.waiting, sample.kv_fraction) == (4.0, 1.0, None)


def test_gateway_adds_its_queue_and_stands_in_for_silent_engines() -> None:
    own = 'llamarack_in_flight{replica="a"} 2\nllamarack_in_flight{replica="b"} 1\nllamarack_queued{model="m"} 7\n'
    sample, with_engine = parse_counters(own, 0), parse_counters(own + LLAMA_CPP, 0)
    assert sample is not None
    assert (sample.running, sample.queued, sample.waiting) == (3.0, 7.0, None)
    assert with_engine is not None
    assert (with_engine.running, with_engine.queued) == (4.0, 7.0)


def test_foreign_or_broken_text_is_no_sample() -> None:
    assert parse_counters("process_cpu_seconds_total 4\n", 0) is None
    assert parse_counters("<html>{{{ not metrics", 0) is None


def _sample(running: float | None, preemptions: float | None) -> CounterSample:
    return CounterSample(
        at_monotonic_ns=0,
        running=running,
        waiting=None,
        queued=2,
        kv_fraction=None,
        preemptions=preemptions,
        output_tokens=None,
    )


def test_summary_has_means_maxima_and_increases() -> None:
    summary = summarize_counters([_sample(1, 10), _sample(3, None), _sample(2, 14)])
    assert summary is not None
    assert (summary.running_mean, summary.running_max, summary.preemptions) == (2.0, 3.0, 4.0)
    assert summary.waiting_mean is None
    assert summary.queued_max == 2


def test_counter_that_went_back_means_a_restart_and_is_unknown() -> None:
    summary = summarize_counters([_sample(1, 10), _sample(1, 2)])
    assert summary is not None
    assert summary.preemptions is None
    assert summarize_counters([]) is None


def test_engines_own_estimate_of_its_work_becomes_a_rate() -> None:
    text = '# TYPE vllm:estimated_flops_per_gpu counter\nvllm:estimated_flops_per_gpu_total{{engine="0"}} {flop}\n'
    text += "# TYPE vllm:estimated_read_bytes_per_gpu counter\nvllm:estimated_read_bytes_per_gpu_total {read}\n"
    text += "# TYPE vllm:estimated_write_bytes_per_gpu counter\nvllm:estimated_write_bytes_per_gpu_total {flop}\n"
    samples = [
        parse_counters(text.format(flop=flop, read=read), at)
        for at, flop, read in ((0, 5e9, 1e9), (2 * 10**9, 9e9, 2e9))
    ]
    summary = summarize_counters([sample for sample in samples if sample is not None])
    assert summary is not None
    assert summary.estimated_flop_per_s == 2e9
    assert summary.estimated_read_bytes_per_s == 0.5e9
    assert summary.estimated_write_bytes_per_s == 2e9
