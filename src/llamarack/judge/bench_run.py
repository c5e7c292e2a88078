"""A bench folder read for a comparison: its result, its facts, and each metric repeat by repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarack.errors import InvalidRun, UsageError
from llamarack.judge.facts import Facts, differences, load_facts
from llamarack.measure.distribution import quantile
from llamarack.measure.metrics import RequestTimes, request_times
from llamarack.measure.point import PointResult
from llamarack.measure.record import Phase, RequestRecord
from llamarack.measure.result import RECORDS_NAME, BenchResult, read_records, read_result

# Of achieved lengths: beyond it two runs did not do the same work.
_LENGTH_TOLERANCE = 0.02
_CACHED_TOLERANCE = 0.01

Samples = Mapping[tuple[float, str], tuple[float | None, ...]]  # (level, metric) -> one value a repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One or several folders of the same deployment. `started_unix_s`: of each repeat, for the order of runs."""

    name: str
    results: tuple[BenchResult, ...]
    facts: Facts
    samples: Samples
    started_unix_s: tuple[float, ...]

    @property
    def levels(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(level for level, _ in self.samples))

    def point(self, level: float) -> PointResult:
        return next(point for point in self.results[0].points if level_of(point) == level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not alike. `name`: what `--allow` and `allow_different` take."""

    name: str
    base: str
    new: str


def level_of(point: PointResult) -> float:
    return float(point.concurrency if point.concurrency is not None else point.rate_per_s or 0.0)


def read_bench_run(names: str, *, accept_invalid: bool = False) -> BenchRun:
    """`names`: a folder, or several of the same deployment, joined by commas. Raises UsageError, InvalidRun."""
    folders = [Path(name) for name in names.split(",") if name]
    if not folders:
        raise UsageError("no run is named", hint="the folder that llamarack bench -o wrote")
    results = tuple(read_result(folder) for folder in folders)
    samples: dict[tuple[float, str], list[float | None]] = {}
    starts: list[float] = []
    for folder, result in zip(folders, results, strict=True):
        if not result.valid and not accept_invalid:
            reasons = [reason for point in result.points for reason in point.invalid_reasons]
            raise InvalidRun(
                f"the run `{folder}` is invalid and proves nothing: {(reasons or ['it was interrupted'])[0]}",
                hint="measure again; `llamarack compare --accept-invalid` compares it all the same",
            )
        records = tuple(read_records((folder if folder.is_dir() else folder.parent) / RECORDS_NAME))
        for key, values in _samples(result, records).items():
            samples.setdefault(key, []).extend(values)
        starts += _starts(result, records)
    facts = [load_facts(folder if folder.is_dir() else folder.parent) for folder in folders]
    _require_alike(folders, results, facts)
    return BenchRun(
        name=names,
        results=results,
        facts=facts[0],
        samples={key: tuple(values) for key, values in samples.items()},
        started_unix_s=tuple(starts),
    )


def _require_alike(folders: Sequence[Path], results: Sequence[BenchResult], facts: Sequence[Facts]) -> None:
    for folder, result, fact in zip(folders[1:], results[1:], facts[1:], strict=True):
        found = [*_workload_differences(results[0], result), *differences(facts[0], fact)]
        if found:
            raise UsageError(
                f"`{folders[0]}` and `{folder}` are no repeats of one run: they differ in "
                f"{found[0].name if isinstance(found[0], Difference) else found[0]}",
                hint="name only runs of the same deployment with the same load together",
            )


def _samples(result: BenchResult, records: Sequence[RequestRecord]) -> dict[tuple[float, str], list[float | None]]:
    samples: dict[tuple[float, str], list[float | None]] = {}
    for number, point in enumerate(result.points):
        level = level_of(point)
        for index, repeat in enumerate(point.repeats):
            mine = [
                record
                for record in records
                if record.point == number
                and record.repeat == index
                and record.phase is Phase.MEASURED
                and not record.is_cancelled
            ]
            values = _of_requests(mine)
            values["output_tokens_per_s"] = repeat.output_tokens_per_s
            values["requests_per_s"] = repeat.requests_per_s
            for metric, value in values.items():
                samples.setdefault((level, metric), []).append(value)
        if point.goodput_requests_per_s is not None:
            samples[level, "goodput_requests_per_s"] = [point.goodput_requests_per_s]
    return samples


_TIMES: Mapping[str, Callable[[RequestTimes], float | None]] = {
    "first_token": lambda times: times.first_token_s,
    "per_token": lambda times: times.per_token_s,
    "end_to_end": lambda times: times.end_to_end_s,
}


def _of_requests(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    finished = [request_times(record) for record in records if not record.is_failure]
    values: dict[str, float | None] = {
        "failures_fraction": sum(record.is_failure for record in records) / len(records) if records else None
    }
    for name, read in _TIMES.items():
        known = [value for times in finished if (value := read(times)) is not None]
        values[f"{name}_p50_s"] = quantile(known, 0.5)
        values[f"{name}_p90_s"] = quantile(known, 0.9)
    return values


def _starts(result: BenchResult, records: Sequence[RequestRecord]) -> list[float]:
    anchor = result.environment
    starts: dict[int, int] = {}
    for record in records:
        at = record.scheduled_monotonic_ns
        starts[record.repeat] = min(starts.get(record.repeat, at), at)
    return [anchor.started_unix_s + (at - anchor.started_monotonic_ns) * 1e-9 for _, at in sorted(starts.items())]


def unlike(base: BenchRun, new: BenchRun) -> tuple[Difference, ...]:
    """What makes the two runs answer different questions."""
    found = _workload_differences(base.results[0], new.results[0])
    found += [
        Difference(name=name, base=_shown(getattr(base.facts, name)), new=_shown(getattr(new.facts, name)))
        for name in differences(base.facts, new.facts)
    ]
    if not set(base.levels) & set(new.levels):
        found.append(Difference(name="levels", base=_shown(base.levels), new=_shown(new.levels)))
    for level in base.levels:
        if level in new.levels:
            found += _reached_differences(level, base.point(level), new.point(level))
    return tuple(found)


_WORKLOAD = ("load", "prompts", "input_tokens", "output_tokens", "is_fixed_length", "is_cache_wanted", "slo")
_CLIENT = ("machine", "processors_usable", "llamarack_version")


def _workload_differences(base: BenchResult, new: BenchResult) -> list[Difference]:
    pairs = [(name, getattr(base.workload, name), getattr(new.workload, name)) for name in _WORKLOAD]
    pairs += [("endpoint", base.target.endpoint, new.target.endpoint)]
    pairs += [
        (f"client_{name.removeprefix('llamarack_')}", getattr(base.environment, name), getattr(new.environment, name))
        for name in _CLIENT
    ]
    return [Difference(name=name, base=_shown(a), new=_shown(b)) for name, a, b in pairs if a != b]


def _reached_differences(level: float, base: PointResult, new: PointResult) -> list[Difference]:
    """Lengths and cache hits as they came out, whatever was asked for."""
    found = []
    for name in ("input_tokens", "output_tokens"):
        a, b = getattr(base, name).mean, getattr(new, name).mean
        if a is not None and b is not None and abs(a - b) > _LENGTH_TOLERANCE * max(a, b):
            found.append(Difference(name=f"reached_{name}", base=f"{a:.1f} at {level:g}", new=f"{b:.1f} at {level:g}"))
    a, b = base.cached_fraction, new.cached_fraction
    if a is not None and b is not None and abs(a - b) > _CACHED_TOLERANCE:
        found.append(Difference(name="cached_fraction", base=f"{a:.1%} at {level:g}", new=f"{b:.1%} at {level:g}"))
    return found


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_interleaved(base: BenchRun, new: BenchRun) -> bool:
    """Repeat by repeat one of each: then what the machine did between them is in the differences of pairs."""
    if len(base.started_unix_s) != len(new.started_unix_s) or len(base.started_unix_s) < 2:
        return False
    order = sorted([(at, 0) for at in base.started_unix_s] + [(at, 1) for at in new.started_unix_s])
    sides = [side for _, side in order]
    return all({sides[i], sides[i + 1]} == {0, 1} for i in range(0, len(sides), 2))
