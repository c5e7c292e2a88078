"""`llamarack demo`: a small real model, served and asked one question, from nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from llamarack.cli.console import people, print_entry
from llamarack.cli.serve import StateDir, deployment_of_model, print_invitation
from llamarack.config import Deployment
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir, rack_paths
from llamarack.supervise.rack import run_rack
from llamarack.supervise.standby import DEMO_NAME
from llamarack.supervise.supervisor import Supervisor
from llamarack.units import format_duration, format_rate

if TYPE_CHECKING:
    from llamarack.measure.ask import FirstAnswer

_SEQUENCES = 4


def demo(
    replicas: Annotated[int, typer.Option(min=1, max=16, help="Copies of the model.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the endpoint; 0: any free one.")] = 8080,
    prompt: Annotated[str, typer.Option(help="The question asked at the end.")] = "What is the capital of France?",
    once: Annotated[bool, typer.Option("--once", help="Ask one question, print the answer, stop everything.")] = False,
    model: Annotated[Path | None, typer.Option(help="Another GGUF file.")] = None,
    rack: Annotated[str, typer.Option(help="Name of the rack.")] = "demo",
    state_dir: StateDir = None,
) -> None:
    """Serve a small real model and ask it a question. It is SmolLM2-135M-Instruct."""
    path = model or demo_model(cache_dir(), lambda text: people.print(f"[dim]{text}[/]"))
    deployment = _deployment(path, replicas, 0 if once else port, None if model else DEMO_NAME)
    answers: list[FirstAnswer] = []

    async def ask_and_tell(supervisor: Supervisor, all_ready: bool) -> bool:
        if all_ready:
            from llamarack.measure.ask import ask_once  # an HTTP client, imported when the engine is up

            name = supervisor.deployment.models[0].name
            answer = await ask_once(f"http://127.0.0.1:{supervisor.gateways.port}", name, prompt)
            answers.append(answer)
            _print_answer(prompt, answer)
            if not once:
                print_invitation(supervisor, command="Ctrl-C stops it; llamarack status --rack demo shows it")
        return not once and all_ready

    number = asyncio.run(
        run_rack(deployment, rack_paths(rack, state_dir), on_entry=print_entry, once_settled=ask_and_tell)
    )
    if not answers:
        raise typer.Exit(128 + number if number is not None else 5)
    raise typer.Exit(128 + number if number is not None and not once else 0)


def _deployment(path: Path, replicas: int, port: int, name: str | None) -> Deployment:
    deployment = deployment_of_model(path, replicas=replicas, name=name)
    (served,) = deployment.models
    (group,) = served.groups
    limits = group.limits.model_copy(update={"sequences": _SEQUENCES, "context_tokens": 2048})
    served = served.model_copy(update={"groups": [group.model_copy(update={"limits": limits})]})
    gateway = deployment.gateway.model_copy(update={"port": port})
    return deployment.model_copy(update={"models": [served], "gateway": gateway})


def _print_answer(prompt: str, answer: FirstAnswer) -> None:
    people.print(f"\n[bold]{escape(prompt)}[/]")
    print(answer.text, flush=True)
    people.print(
        f"[dim]first token {format_duration(answer.first_token_s)} · "
        f"{format_rate(answer.tokens_per_s)} · {answer.tokens} tokens[/]"
    )
