"""The status record as people read it, for `status` and for each second of `status --watch`. Prints nothing itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from llamarack.cli.change_text import change_lines
from llamarack.cli.fitting import fitting, plain_table
from llamarack.units import format_bytes, format_duration, format_rate

_STYLES = {"ready": "green", "failed": "red", "backoff": "red", "stopped": "dim"}
_MARKS = {"info": "[dim]·[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDE = ("model", "replica", "state", "engine", "pid", "busy", "context", "planned", "held", "restarts")
_NARROW = ("replica", "state", "busy", "planned", "held", "restarts")
_RIGHT = frozenset({"pid", "busy", "context", "planned", "held", "restarts", "power", "temperature", "memory", "of"})
_BAR_CELLS = 20
_EVENTS_SHOWN = 8


def headline(record: Mapping[str, Any]) -> str:
    gateway = record["gateway"]
    scheme = "https" if gateway["tls"] else "http"
    return (
        f"rack [bold]{escape(record['rack'])}[/]  {scheme}://{gateway['host']}:{gateway['port']}/v1  "
        f"up {format_duration(record['time_unix_s'] - record['started_unix_s'])}"
        f"  running {gateway['running']}  waiting {gateway['queued']}"
        + ("  [yellow]draining[/]" if record["draining"] else "")
    )


def traffic_table(console: Console, record: Mapping[str, Any], width: int) -> RenderableType | None:
    """How fast each model is, over the last five minutes; None where the record does not tell."""
    traffic = record["gateway"].get("traffic")
    if not traffic:
        return None

    def table(*, with_history: bool) -> RenderableType:
        columns = ("model", "tokens/s", "first token", "p99", "per token", "p99", "failed")
        made = plain_table(
            *columns, *(("last 5 min",) if with_history else ()), right=frozenset(columns[1:]), style="dim"
        )
        for each in traffic:
            first, per = each["first_token_s"], each["per_token_s"]
            times = [format_duration(found[name]) for found in (first, per) for name in ("p50", "p99")]
            cells = [
                escape(each["model"]),
                format_rate(each["tokens_per_s"], "").strip(),
                *times,
                str(each["failures"]),
            ]
            made.add_row(*cells, *((_spark(each["tokens_per_s_history"]),) if with_history else ()))
        return made

    return fitting(console, width, lambda: table(with_history=True), lambda: table(with_history=False))


def replica_table(console: Console, record: Mapping[str, Any], width: int) -> RenderableType:
    rows = [_row(model["name"], replica) for model in record["models"] for replica in model["replicas"]]

    def table(columns: Sequence[str]) -> RenderableType:
        made = plain_table(*columns, right=_RIGHT, style="dim")
        for row in rows:
            made.add_row(*(row[name] for name in columns))
        return made

    return fitting(console, width, lambda: table(_WIDE), lambda: table(_WIDE[1:]), lambda: table(_NARROW))


def hardware_table(record: Mapping[str, Any]) -> RenderableType | None:
    """Cards, or the host where there are none; None where the record tells of neither."""
    cards = record.get("cards") or []
    host = record.get("host") or {}
    made = plain_table("device", "", "memory", "of", "busy", "power", "temperature", right=_RIGHT, style="dim")
    for card in cards:
        used, total = card.get("memory_used_bytes"), card["memory_total_bytes"]
        busy, power, heat = card.get("utilisation_fraction"), card.get("power_w"), card.get("temperature_c")
        made.add_row(f"{card['index']} {escape(short_card(card['name']))}", _bar(used, total), format_bytes(used),
                     format_bytes(total), _percent(busy), _or_dash(power, "W"), _or_dash(heat, "°C"))  # fmt: skip
    used, total = host.get("memory_used_bytes"), host.get("memory_total_bytes")
    if total:
        made.add_row("host", _bar(used, total), format_bytes(used), format_bytes(total),
                     _percent(host.get("cpu_fraction")), "", "")  # fmt: skip
    return made if made.row_count else None


def degradations(record: Mapping[str, Any]) -> Iterator[str]:
    """What was taken from replicas that ran out of memory."""
    for model in record["models"]:
        for replica in model["replicas"]:
            was = replica["degraded_from"]
            if was is None:
                continue
            told = ", ".join(f"{one['setting']} {_step(one['was'])} -> {_step(one['becomes'])}" for one in was["steps"])
            yield f"{replica['id']}: [yellow]degraded after out of memory[/]: {escape(told)}"
            yield "  [cyan]hint[/]: the deployment file still asks for more; llamarack plan FILE shows what fits"


def _step(value: float | str) -> str:
    return PurePath(value).name if isinstance(value, str) else f"{value:g}"


def proofs(record: Mapping[str, Any]) -> Iterator[str]:
    """Whether what runs is what was benchmarked and verified."""
    known = record.get("proofs", ())
    current = [f"{one['kind']} {one['verdict']} {_ago(one['at_unix_s'])}" for one in known if one["is_current"]]
    if current:
        yield f"[dim]proved with these settings: {escape(', '.join(current))}[/]"
    for one in known:
        if not one["is_current"]:
            yield (
                f"[yellow]settings changed since the last valid {one['kind']}[/] "
                f"({escape(one['verdict'])}, {_ago(one['at_unix_s'])}): llamarack acceptance FILE"
            )


def _ago(at_unix_s: float) -> str:
    return f"{format_duration(max(0.0, time.time() - at_unix_s))} ago"


def deaths(record: Mapping[str, Any]) -> Iterator[str]:
    """Why replicas died last, with what to do."""
    for model in record["models"]:
        for replica in model["replicas"]:
            death = replica["last_death"]
            if death is None:
                continue
            ago = _ago(death["at_unix_s"])
            yield f"{replica['id']}: {escape(death['message'])} (while {death['while']}, {ago})"
            if death["hint"]:
                yield f"  [cyan]hint[/]: {escape(death['hint'])}"


def watched(console: Console, record: Mapping[str, Any], width: int, height: int) -> RenderableType:
    """All of it, cut to one screen; the events get the lines that are left."""
    parts: list[RenderableType] = [_line(headline(record)), ""]
    traffic, hardware = traffic_table(console, record, width), hardware_table(record)
    parts += [traffic, ""] if traffic is not None else []
    told = (*change_lines(record.get("change")), *deaths(record))
    parts += [replica_table(console, record, width), *map(_line, told)]
    parts += ["", hardware] if hardware is not None else []
    options = console.options.update(width=width, height=None)
    taken = len(console.render_lines(Group(*parts), options))
    room = min(_EVENTS_SHOWN, height - taken - 2)
    if room > 0 and record["events"]:
        parts += ["", *(_line(_event(entry)) for entry in record["events"][-room:])]
    return Group(*parts)


def short_card(name: str) -> str:
    """`RTX 4090` of `NVIDIA GeForce RTX 4090`."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _line(markup: str) -> Text:
    text = Text.from_markup(markup)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _row(model: str, replica: Mapping[str, Any]) -> dict[str, str]:
    style = _STYLES.get(replica["state"], "yellow")
    held = replica["actual"]["card_held_bytes"]
    actual = sum(held.values()) if held else replica["actual"]["resident_bytes"]
    stuck = replica.get("slots_stuck")
    busy = replica.get("slots_busy", replica["running"])
    return {
        "model": escape(model),
        "replica": escape(replica["id"]),
        "state": f"[{style}]{replica['state']}[/]{_load_share(replica.get('loading'))}",
        "engine": replica["engine"],
        "pid": str(replica["pid"] or "–"),
        "busy": f"{busy}/{replica['slots_total']}" + (f" [red]{stuck} stuck[/]" if stuck else ""),
        "context": f"{replica['context_tokens']:,}",
        "planned": format_bytes(replica["predicted"]["total_bytes"]),
        "held": format_bytes(actual if replica["pid"] else None),
        "restarts": str(replica["restarts"]),
    }


def _load_share(loading: Mapping[str, Any] | None) -> str:
    return "" if loading is None or loading["fraction"] is None else f" {100 * loading['fraction']:.0f} %"


def _event(entry: Mapping[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(entry["time_unix_s"]))
    mark = "[green]✓[/]" if entry["kind"] == "ready" else _MARKS[entry["severity"]]
    who = f"[bold]{escape(entry['replica'])}[/] " if entry["replica"] else ""
    return f"[dim]{clock}[/] {mark} {who}{escape(entry['message'])}"


def _bar(used: float | None, total: float) -> str:
    if used is None:
        return ""
    full = round(_BAR_CELLS * min(1.0, used / total))
    return f"[cyan]{'█' * full}[/][dim]{'░' * (_BAR_CELLS - full)}[/]"


def _spark(values: Sequence[float]) -> str:
    top = max(values) or 1.0
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * value / top)] for value in values)


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:.0%}"


def _or_dash(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.0f} {unit}"
