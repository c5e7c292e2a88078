"""`llamarack export spring FILE`: settings for other programs, written from the deployment file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llamarack import config
from llamarack.cli.console import people
from llamarack.config import Deployment
from llamarack.errors import UsageError

app = typer.Typer(help="Settings for other programs, from a deployment file.", no_args_is_help=True)


class SpringAi(StrEnum):
    V1 = "1"
    V2 = "2"


@app.command("spring")
def spring(
    file: Annotated[Path, typer.Argument(help="A deployment file.")],
    model: Annotated[str | None, typer.Option(help="Which of its models; default: the first.")] = None,
    spring_ai: Annotated[SpringAi, typer.Option(help="Major version of Spring AI.")] = SpringAi.V2,
) -> None:
    """Print application.properties for Spring AI."""
    print(spring_properties(config.load(file).deployment, model, spring_ai), end="")
    people.print("[dim]append it to src/main/resources/application.properties[/]")


def spring_properties(deployment: Deployment, wanted: str | None, version: SpringAi) -> str:
    """Spring AI 1.x adds /v1 to the base URL itself, 2.x does not. Raises UsageError for a model that is not there."""
    names = [model.name for model in deployment.models]
    if wanted is not None and wanted not in names:
        raise UsageError(f"`--model {wanted}`: the file has no such model", hint=f"--model {names[0]}")
    model = next(model for model in deployment.models if wanted in (None, model.name))
    gateway = deployment.gateway
    host = "127.0.0.1" if gateway.host in {"0.0.0.0", "::"} else gateway.host
    url = f"{'https' if gateway.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{gateway.port}"
    key = "${LLAMARACK_API_KEY}" if gateway.api_keys_file else "${LLAMARACK_API_KEY:none}"
    options = "chat.options" if version is SpringAi.V1 else "chat"
    lines = [f"spring.ai.openai.base-url={url}" + ("/v1" if version is SpringAi.V2 else "")]
    lines += [f"spring.ai.openai.api-key={key}", f"spring.ai.openai.{options}.model={model.name}"]
    if model.defaults.max_tokens is not None:
        lines.append(f"spring.ai.openai.{options}.max-tokens={model.defaults.max_tokens}")
    if version is SpringAi.V2:
        # Covers the whole call, its stream included, and is 60 s when it is not set.
        lines += [f"spring.ai.openai.timeout={gateway.request_timeout_s:.0f}s", "spring.ai.openai.max-retries=2"]
    else:
        # The defaults (10 attempts, up to 3 min apart) keep a user waiting for half an hour.
        lines += ["spring.ai.retry.max-attempts=3", "spring.ai.retry.backoff.initial-interval=1s"]
        lines += ["spring.ai.retry.backoff.multiplier=2", "spring.ai.retry.backoff.max-interval=10s"]
    return "".join(line + "\n" for line in lines)
