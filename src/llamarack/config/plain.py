"""Records as plain values, for JSON and YAML, and back where a process of the same rack wrote them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from llamarack.config.records import Gateway, Heartbeat, Record

_GATEWAY_PATHS = ("api_keys_file", "tls_cert", "tls_key")


def plain(record: Record, *, leave_out: Collection[str] = (), without_defaults: bool = False) -> dict[str, Any]:
    """Paths become text. `leave_out`: keys of the record itself; `without_defaults`: what equals its default, too."""
    found = {}
    for each in fields(record):  # type: ignore[arg-type]  # every record is one
        if each.name in leave_out:
            continue
        value = getattr(record, each.name)
        if without_defaults:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if value == default:
                continue
        found[each.name] = _plain(value, without_defaults)
    return found


def _plain(value: Any, without_defaults: bool) -> Any:
    if isinstance(value, Record):
        return plain(value, without_defaults=without_defaults)
    if isinstance(value, list):
        return [_plain(each, without_defaults) for each in value]
    if isinstance(value, dict):
        return dict(value)
    return str(value) if isinstance(value, Path) else value


def gateway_from_plain(value: dict[str, Any]) -> Gateway:
    """What `plain` made of one, not checked again."""
    paths = {name: Path(value[name]) for name in _GATEWAY_PATHS if value[name] is not None}
    return Gateway(**{**value, **paths, "heartbeat": Heartbeat(**value["heartbeat"])})
