"""What does the target accept, and how does it count? Asked once before a run; nothing here is measured.

Extra request fields make counts exact or lengths fixed, but a strict server refuses unknown fields: each group is
tried, and dropped with a note where the server answers 400 or 422.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from llamarack.errors import EngineError, NothingRunning, UsageError
from llamarack.measure.client import Client, Job
from llamarack.measure.record import ErrorKind, Phase, RequestRecord
from llamarack.measure.target import Endpoint

_TIMEOUT_S = 120.0
_OUTPUT = -1  # stands for the asked number of output tokens
# vLLM: continuous_usage_stats, ignore_eos, min_tokens. llama.cpp: timings_per_token, ignore_eos, cache_prompt.
EXTRAS: Mapping[str, Mapping[str, Any]] = {
    "running counts": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "timings_per_token": True,
    },
    "fixed length": {"ignore_eos": True, "min_tokens": _OUTPUT},
    "no prompt cache": {"cache_prompt": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`extras`: names of the accepted groups. `round_trip_s`: the fastest GET, network and server together."""

    model: str
    endpoint: Endpoint
    extras: tuple[str, ...]
    has_usage: bool
    round_trip_s: float
    notes: tuple[str, ...]


def request_body(
    served: Served, text: str, *, output_tokens: int | None, is_fixed_length: bool, is_cache_wanted: bool
) -> bytes:
    """Greedy sampling, so that speed does not hang on luck. `output_tokens` None: as many as the model wants."""
    wanted = ["running counts"]
    wanted += ["fixed length"] if is_fixed_length and output_tokens is not None else []
    wanted += [] if is_cache_wanted else ["no prompt cache"]
    names = [name for name in wanted if name in served.extras]
    return orjson.dumps(_body(served.model, served.endpoint, names, text, output_tokens))


def _body(model: str, endpoint: Endpoint, extras: list[str], text: str, output_tokens: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    if endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if output_tokens is not None:
        body["max_tokens"] = output_tokens
    for name in extras:
        body |= {key: output_tokens if value == _OUTPUT else value for key, value in EXTRAS[name].items()}
    return body


async def ask_server(client: Client, *, model: str | None, endpoint: Endpoint) -> Served:
    """Raises NothingRunning, UsageError (key, model, path), EngineError (it runs but cannot answer)."""
    name, round_trip_s = await model_name(client, model)
    accepted, notes = list(EXTRAS), []
    record = await _try(client, name, endpoint, accepted)
    if record.http_status in (400, 422):
        accepted = []
        for extra in EXTRAS:
            if (await _try(client, name, endpoint, [*accepted, extra])).http_status == 200:
                accepted.append(extra)
            else:
                notes.append(f"the server refuses the fields for {extra}: {', '.join(EXTRAS[extra])}")
        record = await _try(client, name, endpoint, accepted)
    _require_answer(record, name)
    if record.num_output_tokens is None:
        notes.append("the server gives no usage: token counts are not known")
    return Served(
        model=name,
        endpoint=endpoint,
        extras=tuple(accepted),
        has_usage=record.num_output_tokens is not None,
        round_trip_s=round_trip_s,
        notes=tuple(notes),
    )


async def model_name(client: Client, model: str | None, *, option: str = "--model") -> tuple[str, float]:
    """`option`: what chooses it on the caller's command line."""
    try:
        answers = [await client.call("GET", "/v1/models", timeout_s=_TIMEOUT_S) for _ in range(3)]
    except (OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise NothingRunning(
            f"nothing answers at `{client.target.url}`: {reason}", hint="llamarack serve FILE, or check the URL"
        ) from error
    answer, round_trip_s = answers[-1], min(each.elapsed_s for each in answers)
    if answer.status in (401, 403):
        raise UsageError(f"`{client.target.url}` wants a key (HTTP {answer.status})", hint="--api-key-file FILE")
    listed = answer.json()
    entries = listed.get("data", []) if isinstance(listed, dict) else []
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
    if model is not None:
        if names and model not in names:
            raise UsageError(
                f"`{option} {model}` is not served; there are: {', '.join(names)}", hint=f"{option} {names[0]}"
            )
        return model, round_trip_s
    if len(names) != 1:
        raise UsageError(
            f"`{client.target.url}` lists {len(names)} models; one must be chosen",
            hint=f"{option} {names[0] if names else 'NAME'}",
        )
    return names[0], round_trip_s


async def _try(client: Client, model: str, endpoint: Endpoint, extras: list[str]) -> RequestRecord:
    body = _body(model, endpoint, extras, "Name two colours", 4)
    return await probe(client, endpoint, orjson.dumps(body))


async def probe(client: Client, endpoint: Endpoint, body: bytes) -> RequestRecord:
    job = Job(
        index=0,
        path=endpoint.path,
        body=body,
        phase=Phase.WARM_UP,
        prompt_id="probe",
        scheduled_monotonic_ns=time.monotonic_ns(),
    )
    return await client.stream(job, timeout_s=_TIMEOUT_S)


def _require_answer(record: RequestRecord, model: str) -> None:
    if record.error_kind is None:
        return
    detail = record.error_detail or record.error_kind
    if record.error_kind is ErrorKind.HTTP_STATUS and (record.http_status or 0) < 500:
        raise UsageError(f"the server refuses a plain request to `{model}`: {detail}", hint="--endpoint completions")
    raise EngineError(f"a first small request to `{model}` failed: {record.error_kind}: {detail}")
