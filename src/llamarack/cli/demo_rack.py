"""What `demo` does: a rack around a small real model, and one question to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamarack.cli import console
from llamarack.cli.serving import deployment_of_model, print_invitation
from llamarack.config import Deployment
from llamarack.errors import EngineError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir, rack_paths
from llamarack.supervise.rack import run_rack
from llamarack.supervise.start_words import DEMO_NAME
from llamarack.supervise.supervisor import Supervisor
from llamarack.units import format_duration, format_rate

if TYPE_CHECKING:
    from llamarack.measure.ask import FirstAnswer

MOST_REPLICAS = 16
QUESTION = "What is the capital of France?"
_SEQUENCES = 4


def serve_demo(
    *, replicas: int, port: int, prompt: str, once: bool, model: Path | None, rack: str, state_dir: Path | None
) -> int:
    """Until it is stopped, or for one answer (`once`). Returns the exit code."""
    path = model or demo_model(cache_dir(), lambda text: console.people.print(f"[dim]{text}[/]"))
    deployment = _deployment(path, replicas, 0 if once else port, None if model else DEMO_NAME)
    answers: list[FirstAnswer] = []

    async def ask_and_tell(supervisor: Supervisor, all_ready: bool) -> bool:
        if all_ready:
            from llamarack.measure.ask import ask_once  # an HTTP client, imported when the engine is up

            name = supervisor.deployment.models[0].name
            answer = await ask_once(f"http://127.0.0.1:{supervisor.gateways.port}", name, prompt)
            answers.append(answer)
            try:
                _print_answer(prompt, answer)
            except (OSError, SystemExit):  # nobody reads it: `demo --once` has done its work, `demo` serves on
                return not once
            if not once:
                print_invitation(supervisor, rack=f" --rack {rack}")
        return not once and all_ready

    number = asyncio.run(
        run_rack(deployment, rack_paths(rack, state_dir), on_entry=console.print_entry, once_settled=ask_and_tell)
    )
    if not answers:
        return 128 + number if number is not None else EngineError.exit_code
    return 128 + number if number is not None and not once else 0


def _deployment(path: Path, replicas: int, port: int, name: str | None) -> Deployment:
    deployment = deployment_of_model(path, replicas=replicas, name=name)
    (served,) = deployment.models
    (group,) = served.groups
    limits = replace(group.limits, sequences=_SEQUENCES, context_tokens=2048)
    served = replace(served, groups=[replace(group, limits=limits)])
    gateway = replace(deployment.gateway, port=port)
    return replace(deployment, models=[served], gateway=gateway)


def _print_answer(prompt: str, answer: FirstAnswer) -> None:
    from rich.markup import escape

    console.people.print(f"\n[bold]{escape(prompt)}[/]")
    print(answer.text, flush=True)
    rate = [] if answer.tokens_per_s is None else [format_rate(answer.tokens_per_s)]
    facts = [f"first token {format_duration(answer.first_token_s)}", *rate, f"{answer.tokens} tokens"]
    console.people.print(f"[dim]{' · '.join(facts)}[/]")
