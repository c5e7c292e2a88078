"""The budget table as people read it: on several card sets whether each model fits, on one how well it runs too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from llamarack.cli.console import data
from llamarack.cli.fitting import fitting, plain_table
from llamarack.plan.record import Load
from llamarack.plan.table import Row
from llamarack.units import format_bytes, format_count, format_duration, format_rate

_WAY = ("tokens/s", "per token", "first token", "most at once")


def print_budget(rows: Sequence[Row], names: Sequence[str], load: Load) -> None:
    """`names`: of the card sets that the rows were judged on."""
    one = len(names) == 1
    if one:
        count, tokens = format_count(load.concurrency), format_count(load.context_tokens)
        data.print(f"[bold]{names[0]}[/]  {tokens} tokens x {count} at once")
    forms = (lambda: _on_one(rows), lambda: _on_one_narrow(rows)) if one else (
        lambda: _on_several(rows, names, load), lambda: _on_several_narrow(rows, names)
    )  # fmt: skip
    data.print(fitting(data, data.width, *forms))


def _on_several(rows: Sequence[Row], names: Sequence[str], load: Load) -> Table:
    numbers = ("weights", f"KV, {load.concurrency} x {load.context_tokens}", "rest", "total", "at most", *names)
    table = plain_table("model", "precision", "engine", "file", *numbers, right=frozenset(numbers))
    for row in rows:
        rest = row.total_bytes - row.terms.weights_bytes - row.terms.kv_bytes
        sizes = (row.terms.weights_bytes, row.terms.kv_bytes, rest, row.total_bytes, row.total_high_bytes)
        table.add_row(row.model, row.precision, row.engine, row.quantization, *map(format_bytes, sizes), *row.verdicts)
    return table


def _on_several_narrow(rows: Sequence[Row], names: Sequence[str]) -> Table:
    sets = [name.replace(" x", "\nx") for name in names]  # two lines of heading, else 80 columns are too few
    table = plain_table("model", "file", "engine", "at most", *sets, right=frozenset({"at most", *sets}))
    for row in rows:
        size = row.model.removeprefix("LLaMA-2-")
        table.add_row(size, row.quantization, row.engine, format_bytes(row.total_high_bytes), *row.verdicts)
    return table


def _on_one(rows: Sequence[Row]) -> Table:
    numbers = ("weights", "one copy", *_WAY)
    table = plain_table("", "model", "precision", "file", *numbers, "way", right=frozenset(numbers))
    for row in rows:
        sizes = (row.terms.weights_bytes, row.total_high_bytes)
        way = row.best[0].way if row.best[0] else row.engine
        table.add_row(
            row.verdicts[0], row.model, row.precision, row.quantization, *map(format_bytes, sizes), *_speed(row), way
        )
    return table


def _on_one_narrow(rows: Sequence[Row]) -> Table:
    numbers = ("one copy", "tokens/s", "most at once")
    table = plain_table("", "model", "file", "engine", *numbers, right=frozenset(numbers))
    for row in rows:
        rate, _, _, most = _speed(row)
        table.add_row(
            row.verdicts[0], row.model, row.quantization, row.engine, format_bytes(row.total_high_bytes), rate, most
        )
    return table


def _speed(row: Row) -> Iterable[str]:
    best = row.best[0]
    if best is None:
        return ("–",) * len(_WAY)
    return (
        format_rate(best.tokens_per_s, "").strip(),
        format_duration(best.per_token_s),
        format_duration(best.first_token_s),
        format_count(best.max_sequences),
    )
