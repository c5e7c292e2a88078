"""What a command was told to measure, opened: a URL, a deployment file, a model file, or a saved run.

A file whose rack runs is asked where it runs; any other is started for this command and stopped after it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llamarack.cli.bench import read_key
from llamarack.cli.facts import chosen_model, read_facts
from llamarack.cli.serving import load_target, rack_name
from llamarack.cli.started_rack import started_rack
from llamarack.config import Deployment
from llamarack.errors import NothingRunning, UsageError
from llamarack.judge.collection import CANDIDATE_NAME, REFERENCE_NAME
from llamarack.judge.facts import Facts
from llamarack.measure.target import Target, parse_target
from llamarack.paths import rack_paths
from llamarack.supervise.admin import ask
from llamarack.supervise.effective import deployment_sha256
from llamarack.supervise.journal import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSide:
    """`is_ours`: started here, so it may be started again. `slots`: sequences at once; None: not known."""

    target: Target
    model: str | None
    facts: Facts
    slots: int | None
    is_ours: bool


def is_saved_run(name: str) -> bool:
    path = Path(name)
    return path.suffix == ".json" or any((path / file).exists() for file in (REFERENCE_NAME, CANDIDATE_NAME))


def deployment_of(name: str) -> Deployment | None:
    """None for a URL. Raises UsageError for what is neither URL nor file; ConfigError, ModelError."""
    if "://" in name:
        return None
    if not Path(name).exists():
        raise UsageError(
            f"`{name}` is neither a URL nor a file", hint="a URL, a deployment file, a model, or a saved run"
        )
    return load_target(Path(name), host=None, port=None)


@asynccontextmanager
async def open_side(
    name: str, *, model: str | None, option: str, key_file: Path | None, on_entry: Callable[[Entry], None]
) -> AsyncIterator[OpenSide]:
    """`option`: what chose `model`, for messages. Raises what `serve` would, or UsageError."""
    deployment = deployment_of(name)
    if deployment is None:
        target = parse_target(name, api_key=read_key(key_file))
        yield OpenSide(target=target, model=model, facts=Facts(), slots=None, is_ours=False)
        return
    served = chosen_model(deployment, model, option=option)
    facts = read_facts(deployment, served)
    slots = min(group.limits.sequences for group in served.groups)
    running = await _running_url(Path(name), deployment)
    if running is not None:
        target = parse_target(running, api_key=read_key(key_file))
        yield OpenSide(target=target, model=served.name, facts=facts, slots=slots, is_ours=False)
        return
    only = replace(deployment, models=[served])
    async with started_rack(only, on_entry=on_entry) as rack:
        target = parse_target(rack.base_url, api_key=rack.api_key)
        yield OpenSide(target=target, model=served.name, facts=facts, slots=slots, is_ours=True)


async def _running_url(path: Path, deployment: Deployment) -> str | None:
    """Of the rack that was started from this file; None where none runs.

    Raises UsageError where it runs with other settings: what is measured must be what the file says.
    """
    if path.suffix not in {".yaml", ".yml"}:
        return None
    try:
        record = await ask(rack_paths(rack_name(path)), {"op": "status"})
    except NothingRunning:
        return None
    if record.get("deployment_sha256") not in (None, deployment_sha256(deployment)):
        raise UsageError(
            f"the rack of `{path}` runs with other settings than the file has now",
            hint=f"llamarack stop --rack {record['rack']}: then it is started from the file for this command",
        )
    gateway = record["gateway"]
    return f"{'https' if gateway['tls'] else 'http'}://{gateway['host']}:{gateway['port']}"
