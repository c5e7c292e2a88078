"""Tables that keep their lines whole: the widest form that fits where it is printed."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.table import Table


def plain_table(*columns: str, right: frozenset[str] = frozenset(), style: str = "bold") -> Table:
    table = Table(box=None, pad_edge=False, header_style=style)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def fitting(console: Console, width: int, *forms: Callable[[], RenderableType]) -> RenderableType:
    """The first form that needs no more than `width` columns, else the last."""
    for form in forms[:-1]:
        made = form()
        if console.measure(made, options=console.options.update(width=10_000)).maximum <= width:
            return made
    return forms[-1]()
