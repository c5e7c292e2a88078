"""A plan as people read it: cards by term, ways in order, reasons, notes. Prints, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from llamarack.cli.console import data
from llamarack.model.spec import ModelSpec
from llamarack.plan.explain import explanation
from llamarack.plan.record import CPU_INDEX, Candidate, CardPlan, Plan
from llamarack.plan.remarks import describe
from llamarack.plan.table import Row, columns
from llamarack.units import format_bytes, format_count, format_duration, format_rate

_SHOWN = 8  # candidates of the table; --explain and --json have all
_TERMS = ("weights", "kv", "compute", "graphs", "sampler", "communication", "context")


def print_plan(console: Console, one: Plan, *, explain: bool, specs: Sequence[ModelSpec]) -> None:
    load = one.load
    console.print(f"[bold]{one.model_name}[/]  {format_count(load.context_tokens)} tokens x {load.concurrency} at once")
    fitting = [candidate for candidate in one.candidates if candidate.fits]
    shown = one.candidates[0] if one.candidates else None
    if shown is not None:
        console.print(f"{'' if shown.fits else 'nearest, does not fit: '}{describe(shown)}, {shown.quantization}")
        console.print(_cards_table(shown))
    if fitting or explain:
        console.print(_candidates_table(one.candidates if explain else fitting[:_SHOWN]))
    refused = [candidate for candidate in one.candidates if not candidate.fits]
    for candidate in refused if explain or not fitting else refused[:_SHOWN]:
        reasons = candidate.reasons if explain else candidate.reasons[:1]
        console.print(f"  not {describe(candidate)}: {'; '.join(reasons)}", style="dim", soft_wrap=True)
    notes = (*one.notes, *(shown.reasons if shown is not None and shown.fits else ()))
    for note in notes:
        console.print(f"  · {note}", soft_wrap=True)
    spec = next((spec for spec in specs if shown is not None and str(spec.path) == shown.model_path), None)
    if explain and shown is not None and spec is not None:
        for line in explanation(shown, spec):
            console.print(f"  {line}", soft_wrap=True)


def _cards_table(candidate: Candidate) -> Table:
    plans = candidate.replica_plans or (candidate.cards,)
    cards = [card for cards in plans for card in cards]
    used = [name for name in _TERMS if any(getattr(card.terms, f"{name}_bytes") for card in cards)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("card")
    for name in (*used, "total", "at most", "of", "free after"):
        table.add_column(name, justify="right")
    for card in cards:
        terms = [format_bytes(getattr(card.terms, f"{name}_bytes")) for name in used]
        table.add_row(_card_name(card), *terms, *_totals(card))
    return table


def _card_name(card: CardPlan) -> str:
    return card.name if card.index <= CPU_INDEX else f"{card.index} {card.name}"


def _totals(card: CardPlan) -> Iterable[str]:
    sizes = (card.total_bytes, card.total_high_bytes, card.memory_free_bytes, card.free_after_bytes)
    return map(format_bytes, sizes)


def _candidates_table(candidates: Sequence[Candidate]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "way", "weights"):
        table.add_column(name)
    for name in ("tokens/s", "per token", "first token", "most at once", "longest"):
        table.add_column(name, justify="right")
    for candidate in candidates:
        speed = candidate.predicted
        most = None if candidate.max_sequences is None else candidate.max_sequences * candidate.replicas
        table.add_row(
            ("tight" if candidate.tight else "fits") if candidate.fits else "no",
            describe(candidate),
            candidate.quantization or "",
            format_rate(speed.tokens_per_s, "").strip(),
            format_duration(speed.per_token_s),
            format_duration(speed.first_token_s),
            format_count(most),
            format_count(candidate.max_context_tokens),
        )
    return table


def print_budget(rows: Sequence[Row], sequences: int) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "precision", "engine", "file"):
        table.add_column(name)
    for name in ("weights", f"KV, {sequences} x 4096", "rest", "total", "at most", *columns()):
        table.add_column(name, justify="right")
    for row in rows:
        rest = row.total_bytes - row.terms.weights_bytes - row.terms.kv_bytes
        sizes = (row.terms.weights_bytes, row.terms.kv_bytes, rest, row.total_bytes, row.total_high_bytes)
        table.add_row(row.model, row.precision, row.engine, row.quantization, *map(format_bytes, sizes), *row.verdicts)
    data.print(table)
