"""A tune run for people: its table, its sentences, its page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from llamarack.measure.tune import Claim, Outcome, Trial
from llamarack.measure.tune_record import TuneResult, WeightsUsed, to_json
from llamarack.report.bench_rows import UNKNOWN, Table, without_empty
from llamarack.report.chart import Chart, Line
from llamarack.report.markdown import table_markdown
from llamarack.report.page import Page, page_html
from llamarack.units import format_duration

_REPORT, _MARKDOWN = "tune.html", "tune.md"


def trial_name(trial: Trial, result: TuneResult) -> str:
    """What is not the file's own weights is named, and their engine where it is another."""
    weights = result.weights[trial.weights]
    if trial.is_own:
        name = f"{weights.engine}'s own: {_own_text(weights)}"
    else:
        batch = "auto" if trial.batch_tokens is None else f"{trial.batch_tokens}"
        name = f"batch_tokens {batch}, sequences {trial.sequences}"
        if trial.context_tokens != result.start.context_tokens:
            name += f", context {trial.context_tokens}"
    if trial.weights:
        name += f", {Path(weights.path).name}"
        if weights.engine != result.weights[0].engine and not trial.is_own:
            name += f" on {weights.engine}"
    return f"the file: {name}" if trial == result.start else name


def _own_text(weights: WeightsUsed) -> str:
    own = weights.own
    if own["kv_unified"]:
        return f"{own['sequences']} sequences in one context of {own['context_tokens']}"
    return f"{own['sequences']} sequences, context {own['context_tokens']}"


def outcome_line(outcome: Outcome, result: TuneResult) -> str:
    """One trial as it ends."""
    return f"{trial_name(outcome.trial, result)}: {_seen_text(outcome)}"


def _seen_text(outcome: Outcome) -> str:
    if outcome.goodput_per_s is None or outcome.best_level is None:
        return f"no goodput ({outcome.reason})"
    level = outcome.levels[outcome.best_level]
    kept = "" if level.kept_fraction is None else f", {level.kept_fraction:.0%} kept the promise"
    memory = "" if outcome.memory_fraction is None else f", fullest card {outcome.memory_fraction:.0%}"
    reason = "" if outcome.reason is None else f" ({outcome.reason})"
    return f"{outcome.goodput_per_s:.3f} good requests/s at {level}{kept}{memory}{reason}"


def trials_table(result: TuneResult) -> Table:
    """Each at its best load. Columns that say nothing of any trial are left out."""
    return without_empty(
        Table(
            title="Settings that were measured",
            headers=(
                *("setting", "good requests/s", "at requests/s" if result.load.rates_per_s else "at concurrency"),
                *("kept", "first token", "per token", "tokens/s", "fullest card"),
            ),
            rows=tuple(_trial_row(outcome, result) for outcome in result.outcomes),
            note=f"Good requests keep {result.load.slo} (ms). Each setting at its best load; "
            f"{requests_text(result.load.requests)} requests at each; times are medians.",
        )
    )


def _trial_row(outcome: Outcome, result: TuneResult) -> tuple[str, ...]:
    level = None if outcome.best_level is None else outcome.levels[outcome.best_level]
    memory = UNKNOWN if outcome.memory_fraction is None else f"{outcome.memory_fraction:.0%}"
    if level is None:
        return (_turn_name(outcome, result), *[UNKNOWN] * 6, memory)
    return (
        _turn_name(outcome, result),
        UNKNOWN if outcome.goodput_per_s is None else f"{outcome.goodput_per_s:.3f}",
        f"{level.concurrency}" if level.rate_per_s is None else f"{level.rate_per_s:g}",
        UNKNOWN if level.kept_fraction is None else f"{level.kept_fraction:.0%}",
        _time(level.first_token_p50_s),
        _time(level.per_token_p50_s),
        UNKNOWN if level.output_tokens_per_s is None else f"{level.output_tokens_per_s:.1f}",
        memory,
    )


def _turn_name(outcome: Outcome, result: TuneResult) -> str:
    name = trial_name(outcome.trial, result)
    return name if outcome.round is None else f"round {outcome.round}: {name}"


def failures_table(result: TuneResult) -> Table | None:
    """Settings that have no goodput or may not be chosen, with the reason."""
    rows = tuple((_turn_name(each, result), each.reason) for each in result.outcomes if each.reason)
    return Table(title="Settings that do not count", headers=("setting", "why"), rows=rows) if rows else None


def requests_text(requests: tuple[int, ...]) -> str:
    """`40`, or `30 to 128` where more load gets more."""
    low, high = min(requests), max(requests)
    return f"{low}" if low == high else f"{low} to {high}"


def levels_table(result: TuneResult) -> Table | None:
    """The best and the engine's own settings at every load."""
    if not result.by_level:
        return None
    rows = tuple(
        (
            f"concurrency {each.concurrency}" if each.rate_per_s is None else f"{each.rate_per_s:g} requests/s",
            UNKNOWN if each.best_per_s is None else f"{each.best_per_s:.3f}",
            UNKNOWN if each.own_per_s is None else f"{each.own_per_s:.3f}",
            UNKNOWN if each.gain_fraction is None else f"{each.gain_fraction:+.1%}",
            UNKNOWN
            if each.gain_interval is None
            else f"{each.gain_interval.low:+.1%} to {each.gain_interval.high:+.1%}",
        )
        for each in result.by_level
    )
    return Table(
        title="The best setting beside the engine's own, at each load",
        headers=("load", "best, good requests/s", "engine's own", "gain", "95 % interval"),
        rows=rows,
        note="Means over the rounds in which both were measured in turn; the gain is the mean of the rounds' ratios.",
    )


def conclusion(result: TuneResult) -> list[str]:
    """What was found, in sentences; the first is the answer."""
    if result.is_interrupted:
        return ["interrupted: nothing is concluded"]
    best = next((each for each in result.outcomes if each.trial == result.best), None)
    if result.best is None or best is None:
        return [f"nothing could be measured: {_first_reason(result)}"]
    if not best.goodput_per_s:
        return [nothing_kept(result)]
    lines = [f"best: {trial_name(result.best, result)}"]
    lines += [_claim_text(claim, result) for claim in result.claims]
    if result.is_better and not any(claim.base == "file" for claim in result.claims):
        lines.append(f"the file as it is does not run: {_file_reason(result)}")
    if result.best != result.start and not result.is_better:
        lines.append("not shown to be better than the file, which stays as it is")
    if result.best == result.start:
        lines.append("no setting was better than the file, which stays as it is")
    if result.is_better and result.best.weights:
        lines.append("its answers differ with the precision: llamarack verify compares them before it is used")
    if result.is_out_of_time:
        lines.append("the time was up before all settings were tried")
    return [*lines, *result.notes]


def nothing_kept(result: TuneResult) -> str:
    """Which promise could have been kept: the fastest first token and time per token of all trials."""
    levels = [level for outcome in result.outcomes for level in outcome.levels]
    first = min((level.first_token_p50_s for level in levels if level.first_token_p50_s is not None), default=None)
    each = min((level.per_token_p50_s for level in levels if level.per_token_p50_s is not None), default=None)
    return (
        f"no setting keeps {result.load.slo} for a single request; the shortest medians were {_time(first)} to the "
        f"first token and {_time(each)} per token"
    )


def _file_reason(result: TuneResult) -> str:
    return next((each.reason for each in result.outcomes if each.trial == result.start and each.reason), UNKNOWN)


def _first_reason(result: TuneResult) -> str:
    return next((each.reason for each in result.outcomes if each.reason), "no trial was run")


def _claim_text(claim: Claim, result: TuneResult) -> str:
    assert result.best is not None
    mine = result.weights[result.best.weights]
    over = {
        "own": f"{mine.engine}'s own settings at equal precision ({mine.precision})",
        "file": "the file as it is",
        "precision": f"the best setting at the file's precision ({result.weights[0].precision}, here "
        f"{mine.precision} on {mine.engine})",
    }[claim.base]
    if claim.gain_fraction is not None and claim.gain_interval is not None:
        low, high = claim.gain_interval.low, claim.gain_interval.high
        doubt = "" if low > 0 else ", which is no proof of a gain"
        return f"{claim.gain_fraction:+.1%} [{low:+.1%} to {high:+.1%}] over {over}{doubt}"
    if claim.is_better:
        mean = sum(claim.best_per_s) / len(claim.best_per_s)
        return f"{mean:.3f} good requests/s where {over} keep the promise for none"
    return f"how it compares with {over} could not be measured"


def _time(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else format_duration(value_s)


def tune_markdown(result: TuneResult) -> str:
    found = (levels_table(result), trials_table(result), failures_table(result))
    tables = [table for table in found if table is not None]
    said = "\n".join(f"- {line}" for line in conclusion(result))
    return f"# Tuning of {result.model}\n\n{said}\n\n" + "\n".join(map(table_markdown, tables))


def tune_html(result: TuneResult) -> str:
    started = datetime.fromtimestamp(result.environment.started_unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    said, used = conclusion(result), result.weights
    tables = [table for table in (levels_table(result), trials_table(result)) if table is not None]
    return page_html(
        Page(
            title=f"Tuning of {result.model}",
            subtitle=f"{result.file}, {_load_text(result)}, {started}",
            verdict="BETTER" if result.is_better else "INTERRUPTED" if result.is_interrupted else "UNCHANGED",
            meaning=said[0],
            reasons=said[1:],
            notes=[f"{each.engine} {each.engine_version or UNKNOWN}, {each.precision}: {each.path}" for each in used],
            numbers=tables,
            texts=[table for table in (failures_table(result),) if table is not None],
            charts=_charts(result),
            data=to_json(result).decode(),
        )
    )


def _load_text(result: TuneResult) -> str:
    load = result.load
    levels = ", ".join([*map(str, load.concurrency), *(f"{rate:g}/s" for rate in load.rates_per_s)])
    tokens = f"{load.prompts}, {load.output_tokens} tokens at most"
    if load.input_tokens is not None:
        tokens = f"{load.input_tokens} + {load.output_tokens} tokens"
    kind = "concurrency" if load.concurrency else "requests per second"
    return f"{kind} {levels}, {tokens}, {load.slo}"


def _charts(result: TuneResult) -> list[Chart]:
    """Goodput against load: the best, the engine's own and the file."""
    is_open = bool(result.load.rates_per_s)
    wanted = dict.fromkeys(
        trial
        for trial in (result.best, Trial(is_own=True, weights=result.best.weights if result.best else 0), result.start)
        if trial is not None
    )
    lines = []
    for trial in wanted:
        outcomes = [each for each in result.outcomes if each.trial == trial and each.levels]
        points = _mean_points(outcomes)
        if points:
            name = "best" if trial == result.best else "engine's own" if trial.is_own else "the file"
            lines.append(Line(name=name, points=points))
    if not lines:
        return []
    label = "requests/s sent" if is_open else "requests at once"
    return [
        Chart(
            title="Requests that keep the promise", x_label=label, y_label="good requests/s", lines=tuple(lines),
            x_is_log=not is_open, x_from_zero=is_open,
        )
    ]  # fmt: skip


def _mean_points(outcomes: list[Outcome]) -> tuple[tuple[float, float], ...]:
    """Over all times that the setting was measured."""
    by_load: dict[float, list[float]] = {}
    for outcome in outcomes:
        for level in outcome.levels:
            load = float(level.concurrency or level.rate_per_s or 0)
            if level.goodput_per_s is not None:
                by_load.setdefault(load, []).append(level.goodput_per_s)
    return tuple((load, sum(rates) / len(rates)) for load, rates in sorted(by_load.items()))


def write_tune_report(result: TuneResult, folder: Path) -> Path:
    """`tune.html`, whose path is returned, and `tune.md`."""
    page = folder / _REPORT
    page.write_text(tune_html(result), encoding="utf-8")
    (folder / _MARKDOWN).write_text(tune_markdown(result), encoding="utf-8")
    return page
