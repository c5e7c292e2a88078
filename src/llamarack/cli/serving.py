"""What `serve` does, and what other commands share of it: a target becomes a deployment, a rack its first words."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarack import config, logs
from llamarack.cli import console
from llamarack.config import Deployment, Engine, Group, Limits, Model
from llamarack.errors import EngineError, UsageError
from llamarack.logs import LogFormat
from llamarack.model.read import read_model
from llamarack.model.spec import ModelFormat
from llamarack.paths import RackPaths, make_private, rack_paths, slug
from llamarack.supervise.admin import ask
from llamarack.supervise.rack import run_rack
from llamarack.supervise.rack_lock import is_running
from llamarack.supervise.start_words import called
from llamarack.supervise.supervisor import Source, Supervisor

_DEPLOYMENT_SUFFIXES = {".yaml", ".yml"}
_DETACH_POLL_S = 0.2


def serve_target(
    target: Path,
    *,
    host: str | None,
    port: int | None,
    rack: str | None,
    state_dir: Path | None,
    detach: bool,
    log_format: LogFormat | None,
) -> int:
    """Until it is stopped, or ready where it runs on `detach`ed. Returns the exit code."""
    if log_format is not None:
        os.environ[logs.FORMAT_VARIABLE] = log_format  # the gateway and a detached child are told the same way
    logs.log_format()
    logs.log_max_bytes()
    deployment = load_target(target, host=host, port=port)
    paths = rack_paths(rack or rack_name(target), state_dir)
    if detach:
        return _detach(paths)
    source = Source(path=target.absolute(), host=host, port=port)
    number = asyncio.run(
        run_rack(deployment, paths, on_entry=console.log_entry, once_settled=_tell_ready, source=source)
    )
    return 128 + number if number is not None else 0


def rack_name(target: Path) -> str:
    return slug(target.stem)


def load_target(target: Path, *, host: str | None, port: int | None) -> Deployment:
    """The deployment of a file, or the default one of a model. Raises ConfigError, ModelError."""
    if target.suffix in _DEPLOYMENT_SUFFIXES:
        deployment = config.load(target).deployment
    else:
        deployment = deployment_of_model(target)
    changes = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if not changes:
        return deployment
    # Validated anew: a host that is not loopback needs keys, wherever it was written.
    value = config.plain(deployment)
    value["gateway"].update(changes)
    return config.from_value(value)


def deployment_of_model(path: Path, *, replicas: int = 1, name: str | None = None) -> Deployment:
    """What `serve MODEL` serves: the defaults, with the context cut to what the model was trained for."""
    spec = read_model(path)
    context = min(Limits().context_tokens, spec.context_train_tokens or Limits().context_tokens)
    engine: Engine = "llamacpp" if spec.format is ModelFormat.GGUF else "vllm"
    group = Group(engine=engine, replicas=replicas, limits=Limits(context_tokens=context))
    served = Model(name=name or called(path), path=path.absolute(), groups=[group])
    return Deployment(schema_version=1, models=[served])


async def _tell_ready(supervisor: Supervisor, all_ready: bool) -> bool:
    if logs.log_format() is LogFormat.JSON:
        return True  # the events say it
    if all_ready:
        print_invitation(supervisor)
    else:
        console.people.print("[yellow]not every replica is ready[/]; llamarack status tells why")
    return True


def print_invitation(supervisor: Supervisor, *, rack: str = "") -> None:
    """Where it is and a line to copy. `rack`: the option that names it, where that is needed."""
    from rich.markup import escape

    gateway = supervisor.gateways
    scheme = "https" if gateway.settings.tls_cert else "http"
    shown_host = "127.0.0.1" if gateway.settings.host in {"0.0.0.0", "::"} else gateway.settings.host
    url = f"{scheme}://{f'[{shown_host}]' if ':' in shown_host else shown_host}:{gateway.port}/v1"
    name = supervisor.deployment.models[0].name
    key = " -H 'Authorization: Bearer YOUR-KEY'" if gateway.settings.api_keys_file else ""
    console.people.print(f"\n[bold green]ready[/]  {escape(url)}   model [bold]{escape(name)}[/]\n")
    body = {
        "model": name,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
    }
    line = f"  curl {url}/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d '{json.dumps(body)}'\n"
    console.people.print(escape(line))
    console.people.print(f"[dim]Ctrl-C stops it; {console.typed(f'llamarack status{rack}')} shows it[/]")


def _detach(paths: RackPaths) -> int:
    """Runs the same command in a session of its own, until every replica is ready or failed; where the rack ends
    instead, it speaks for itself. Returns the exit code.
    """
    from rich.markup import escape

    if is_running(paths):
        raise UsageError(f"rack `{paths.name}` is already running", hint=f"llamarack stop --rack {paths.name}")
    make_private(paths.folder)
    make_private(paths.logs)
    log = paths.log_of("serve")
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    with open(logs.fresh_own_log(log), "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "llamarack", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, logs.OWN_LOG_VARIABLE: str(log)},
        )
    while process.poll() is None:
        time.sleep(_DETACH_POLL_S)
        record = _status_or_none(paths)
        if record is None:
            continue
        if is_served(record):
            gateway = record["gateway"]
            states = _states(record)
            ready = states.count("ready")
            url = f"{'https' if gateway['tls'] else 'http'}://{gateway['host']}:{gateway['port']}/v1"
            console.people.print(f"ready  {url}   rack [bold]{escape(paths.name)}[/]")
            if ready < len(states):
                console.people.print(
                    f"[yellow]{len(states) - ready} of {len(states)} replicas failed[/]; llamarack status"
                )
            console.people.print(
                f"[dim]{console.typed('llamarack')} stop --rack {paths.name} ends it; its output is in {log}[/]"
            )
            return 0
    print(log.read_text(errors="replace").strip(), file=sys.stderr)
    return process.returncode if process.returncode > 0 else EngineError.exit_code


def is_served(record: Mapping[str, Any]) -> bool:
    """Whether a rack has settled, by its `status`: some replicas are ready, the others failed, and the gateway knows.
    With none ready the rack ends by itself and tells why."""
    states = set(_states(record))
    return "ready" in states and states <= {"ready", "failed"} and bool(record["gateway"]["is_current"])


def _states(record: Mapping[str, Any]) -> list[str]:
    return [replica["state"] for model in record["models"] for replica in model["replicas"]]


def _status_or_none(paths: RackPaths) -> dict[str, Any] | None:
    try:
        return asyncio.run(ask(paths, {"op": "status"}, timeout_s=5.0))
    except EngineError:
        return None
