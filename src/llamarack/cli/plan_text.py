"""A plan as people read it: cards by term, ways in order, reasons, notes. Prints, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from llamarack.cli.fitting import fitting, plain_table
from llamarack.cli.status_text import short_card
from llamarack.model.spec import ModelSpec
from llamarack.plan.explain import explanation
from llamarack.plan.record import CPU_INDEX, Candidate, CardPlan, Plan
from llamarack.plan.remarks import describe
from llamarack.units import format_bytes, format_count, format_duration, format_rate

_SHOWN = 8  # candidates of the table; --explain and --json have all
_TOTALS = ("total", "at most", "of", "free after")
_TERMS = ("weights", "kv", "compute", "graphs", "sampler", "communication", "context")


def print_plan(console: Console, one: Plan, *, explain: bool, specs: Sequence[ModelSpec]) -> None:
    load = one.load
    console.print(f"[bold]{one.model_name}[/]  {format_count(load.context_tokens)} tokens x {load.concurrency} at once")
    fits = [candidate for candidate in one.candidates if candidate.fits]
    shown = one.candidates[0] if one.candidates else None
    if shown is not None:
        console.print(f"{'' if shown.fits else 'nearest, does not fit: '}{describe(shown)}, {shown.quantization}")
        console.print(fitting(console, console.width, lambda: _cards_table(shown), lambda: _cards_narrow(shown)))
    if fits or explain:
        ways = one.candidates if explain else fits[:_SHOWN]
        console.print(
            fitting(console, console.width, lambda: _candidates_table(ways), lambda: _candidates_narrow(ways))
        )
    refused = [candidate for candidate in one.candidates if not candidate.fits]
    for candidate in refused if explain or not fits else refused[:_SHOWN]:
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
    for name in (*used, *_TOTALS):
        table.add_column(name, justify="right")
    for card in cards:
        terms = [format_bytes(getattr(card.terms, f"{name}_bytes")) for name in used]
        table.add_row(_card_name(card), *terms, *_totals(card))
    return table


def _cards_narrow(candidate: Candidate) -> Group:
    """The totals as a table, the terms of each kind of card in a line below."""
    plans = candidate.replica_plans or (candidate.cards,)
    cards = [card for cards in plans for card in cards]
    table = plain_table("card", *_TOTALS, right=frozenset(_TOTALS))
    by_terms: dict[str, list[str]] = {}
    for card in cards:
        table.add_row(_card_name(card, short=True), *_totals(card))
        sizes = {name: getattr(card.terms, f"{name}_bytes") for name in _TERMS}
        told = " · ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
        by_terms.setdefault(told, []).append(_card_name(card, short=True))
    alike = len(by_terms) == 1
    lines = [f"  {told}" if alike else f"  {', '.join(names)}: {told}" for told, names in by_terms.items()]
    return Group(table, *(Text(line, style="dim") for line in lines))


def _card_name(card: CardPlan, *, short: bool = False) -> str:
    name = short_card(card.name) if short else card.name
    return name if card.index <= CPU_INDEX else f"{card.index} {name}"


def _totals(card: CardPlan) -> Iterable[str]:
    sizes = (card.total_bytes, card.total_high_bytes, max(0, card.memory_free_bytes or 0), card.free_after_bytes)
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


def _candidates_narrow(candidates: Sequence[Candidate]) -> Table:
    """Without what is the same in most rows; --explain and --json have all."""
    table = plain_table(
        "", "way", "tokens/s", "per token", "first token", right=frozenset({"tokens/s", "per token", "first token"})
    )
    for candidate in candidates:
        speed = candidate.predicted
        table.add_row(
            ("tight" if candidate.tight else "fits") if candidate.fits else "no",
            describe(candidate),
            format_rate(speed.tokens_per_s, "").strip(),
            format_duration(speed.per_token_s),
            format_duration(speed.first_token_s),
        )
    return table
