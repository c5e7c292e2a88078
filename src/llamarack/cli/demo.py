"""`llamarack demo`: a small real model, served and asked one question, from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamarack.cli.demo_rack import MOST_REPLICAS, QUESTION, serve_demo
from llamarack.cli.serve import StateDir


def demo(
    replicas: Annotated[int, typer.Option(min=1, max=MOST_REPLICAS, help="Copies of the model.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the endpoint; 0: any free one.")] = 8080,
    prompt: Annotated[str, typer.Option(help="The question asked at the end.")] = QUESTION,
    once: Annotated[bool, typer.Option("--once", help="Ask one question, print the answer, stop everything.")] = False,
    model: Annotated[Path | None, typer.Option(help="Another GGUF file.")] = None,
    rack: Annotated[str, typer.Option(help="Name of the rack.")] = "demo",
    state_dir: StateDir = None,
) -> None:
    """Serve a small real model and ask it a question. It is SmolLM2-135M-Instruct."""
    raise typer.Exit(
        serve_demo(replicas=replicas, port=port, prompt=prompt, once=once, model=model, rack=rack, state_dir=state_dir)
    )
