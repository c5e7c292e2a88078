"""The dialects of the engines, by name. An engine's adaptor is its dialect, and how it is started."""

from __future__ import annotations

from llamarack.engine.dialect import Counters, Deviations, Dialect, KvUse, MetricNames, read_counters
from llamarack.engine.vllm_kv import kv_use

# Fields that its server drops without a word, with the values that ask for nothing (b11549, tried one by one).
_IGNORED_BY_LLAMACPP: dict[str, dict[str, tuple[object, ...]]] = {
    "/completions": {"echo": (None, False), "suffix": (None, ""), "best_of": (None, 1)},
    "/embeddings": {"dimensions": (None,)},
}
_OF_LLAMACPP = MetricNames(
    generated_tokens=("llamacpp:tokens_predicted_total",),
    prompt_tokens=("llamacpp:prompt_tokens_total",),
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    steps=("llamacpp:n_decode_total",),
)
_OF_VLLM = MetricNames(
    generated_tokens=("vllm:generation_tokens_total", "vllm:generation_tokens"),
    prompt_tokens=("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    steps=("vllm:iteration_tokens_total_count",),
)
_OF_TRANSFORMERS = MetricNames(
    generated_tokens=("transformers_worker:generated_tokens_total",),
    prompt_tokens=("transformers_worker:prompt_tokens_total",),
    running=("transformers_worker:requests_running",),
    waiting=("transformers_worker:requests_waiting",),
)


class LlamaCppDialect:
    name = "llamacpp"
    # The worker's own keep-alives are off; an error inside a stream comes as `error: {...}` or as a data event.
    deviations = Deviations(ignored_fields=_IGNORED_BY_LLAMACPP, ends_whole_answers=False)

    def counters(self, metrics_text: str) -> Counters:
        return read_counters(metrics_text, _OF_LLAMACPP)

    def kv_use(self, metrics_text: str) -> KvUse | None:
        return None  # the table tells the size of a unified cache; each slot has its own otherwise


class VllmDialect:
    name = "vllm"
    # An error inside a stream comes as `data: {"error": ...}`; otherwise its events are OpenAI's.
    deviations = Deviations(
        tokenizes_as_vllm=True, keeps_connections=True, death_words="EngineCore encountered an issue"
    )

    def counters(self, metrics_text: str) -> Counters:
        return read_counters(metrics_text, _OF_VLLM)

    def kv_use(self, metrics_text: str) -> KvUse | None:
        return kv_use(metrics_text)


class TransformersDialect:
    name = "transformers"
    deviations = Deviations(tokenizes_as_vllm=True)

    def counters(self, metrics_text: str) -> Counters:
        return read_counters(metrics_text, _OF_TRANSFORMERS)

    def kv_use(self, metrics_text: str) -> KvUse | None:
        return None


DIALECTS: dict[str, Dialect] = {
    "llamacpp": LlamaCppDialect(),
    "transformers": TransformersDialect(),
    "vllm": VllmDialect(),
}
