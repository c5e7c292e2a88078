"""`llamarack export spring|systemd|compose|kubernetes FILE`: files for other programs, from a deployment file."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from llamarack import config
from llamarack.cli.console import people
from llamarack.config import Deployment
from llamarack.errors import UsageError
from llamarack.model.read import read_model
from llamarack.paths import install_folder, rack_paths, slug
from llamarack.ship.bundle import containerfile_text
from llamarack.ship.compose import compose_node_text, compose_text
from llamarack.ship.container import USER_ID, contained
from llamarack.ship.kubernetes import Cluster, kubernetes_text
from llamarack.ship.service import model_paths, timing
from llamarack.ship.spread import alone, required_spread, spread_of
from llamarack.ship.systemd import NodeUnit, Unit, node_unit_text, unit_text
from llamarack.version import __version__

app = typer.Typer(help="Files for other programs, from a deployment file.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="A deployment file.")]
NodeRank = Annotated[
    int, typer.Option("--node-rank", min=0, help="Of a model that spans several servers: for which of them.")
]


_USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")


class SpringAi(StrEnum):
    V1 = "1"
    V2 = "2"


@app.command("spring")
def spring(
    file: File,
    model: Annotated[str | None, typer.Option(help="Which of its models; default: the first.")] = None,
    spring_ai: Annotated[SpringAi, typer.Option(help="Major version of Spring AI.")] = SpringAi.V2,
) -> None:
    """Print application.properties for Spring AI."""
    print(spring_properties(config.load(file).deployment, model, spring_ai), end="")
    people.print("[dim]append it to src/main/resources/application.properties[/]")


@app.command("systemd")
def systemd(
    file: File,
    user: Annotated[str, typer.Option("--run-as", help="The user it runs as.")] = "llamarack",
    is_user_unit: Annotated[bool, typer.Option("--user", help="A unit of your own, for systemctl --user.")] = False,
    rack: Annotated[str | None, typer.Option(help="Name of the rack; default: the file's stem.")] = None,
    node_rank: NodeRank = 0,
) -> None:
    """Print a systemd unit. With readiness, watchdog, time to load and to drain."""
    deployment = config.load(file).deployment
    if not _USER_NAME.fullmatch(user):
        raise UsageError(f"`--run-as {user}` is not the name of a user", hint="--run-as llamarack")
    if node_rank:
        spread = required_spread(deployment, node_rank)
        node = NodeUnit(
            command=own_command(),
            file=file.absolute(),
            rack=rack_paths(rack or slug(file.stem)).name,
            rank=node_rank,
            user=None if is_user_unit else user,
            models=tuple(model_paths(alone(deployment, spread))),
        )
        print(node_unit_text(node), end="")
        for line in _unit_advice(node.name, node.user):
            people.print(f"[dim]{escape(line)}[/]")
        return
    unit = Unit(
        command=own_command(),
        file=file.absolute(),
        rack=rack_paths(rack or slug(file.stem)).name,
        port=deployment.gateway.port,
        user=None if is_user_unit else user,
        timing=timing(deployment, _weights_bytes(deployment)),
        models=tuple(model_paths(deployment)),
    )
    print(unit_text(unit), end="")
    for line in _unit_advice(unit.name, unit.user):
        people.print(f"[dim]{escape(line)}[/]")
    if unit.user is not None:
        people.print(f"[dim]sudo -u {unit.user} {unit.command[0]} status --state-dir /run/{unit.name} shows it[/]")


@app.command("compose")
def compose(
    file: File,
    image: Annotated[str, typer.Option(help="The image, made from a bundle.")] = f"llamarack:{__version__}",
    node_rank: NodeRank = 0,
) -> None:
    """Print a Compose file. With cards, volumes, health by the load's deadline, time to drain."""
    deployment = config.load(file).deployment
    _require_image(image)
    spread = spread_of(deployment)
    if spread is not None and spread.is_here_alone:
        raise UsageError(
            f"model `{spread.model.name}`: engine_args.master-addr is {spread.address}, which the other servers cannot "
            "reach",
            hint="engine_args: {nnodes: ..., master-addr: ADDRESS-OF-NODE-0}, an address on the network between them",
        )
    inside = contained(deployment, _weights_bytes(deployment), is_on_host_network=spread is not None)
    keys = deployment.gateway.api_keys_file
    owner = (keys.stat().st_uid, keys.stat().st_gid) if keys is not None and keys.stat().st_uid else None
    if keys is not None and owner is None:
        people.print(
            f"[yellow]{escape(str(keys))} belongs to root[/]; the container does not run as root: chown {USER_ID} it"
        )
    if node_rank:
        required_spread(deployment, node_rank)
        print(compose_node_text(inside, node_rank, image=image, owner=owner), end="")
    else:
        print(compose_text(inside, image=image, owner=owner), end="")
    if inside.others is not None:
        people.print(f"[dim]this is node {node_rank} of {inside.others.count + 1}; --node-rank prints the others[/]")
    people.print("[dim]save it as compose.yaml, then: docker compose up -d[/]")
    people.print(
        "[dim]the image: llamarack bundle -o bundle, then docker build -t IMAGE bundle -f bundle/Containerfile[/]"
    )


@app.command("kubernetes")
def kubernetes(
    file: File,
    image: Annotated[str, typer.Option(help="The image, made from a bundle.")] = f"llamarack:{__version__}",
    name: Annotated[str, typer.Option(help="Of the Deployment and the Service.")] = "llamarack",
    namespace: Annotated[str, typer.Option(help="Where they go.")] = "default",
    claim: Annotated[str, typer.Option(help="The claim that holds the models.")] = "llamarack-models",
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Servers that get a whole rack each.")] = 1,
) -> None:
    """Print Kubernetes manifests. With probes by the load's deadline, drain, cards, shared memory, no rights."""
    deployment = config.load(file).deployment
    _require_image(image)
    cluster = Cluster(name=name, namespace=namespace, image=image, claim=claim, nodes=nodes)
    inside = contained(deployment, _weights_bytes(deployment), node_0=cluster.leader_address)
    print(kubernetes_text(inside, cluster, is_insecure_wanted=deployment.gateway.insecure), end="")
    people.print("[dim]save it as llamarack.yaml, then: kubectl apply -f llamarack.yaml[/]")


@app.command("containerfile")
def containerfile() -> None:
    """Print the Containerfile of the image. It makes one from an offline bundle; every bundle holds it."""
    print(containerfile_text(), end="")


def _require_image(image: str) -> None:
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"`--image {image}` is not the name of an image", hint=f"--image llamarack:{__version__}")


def _unit_advice(name: str, user: str | None) -> list[str]:
    service = f"{name}.service"
    if user is None:
        return [
            f"save it as ~/.config/systemd/user/{service}, then: systemctl --user enable --now {service}",
            "loginctl enable-linger keeps it running when you are not logged in",
        ]
    return [
        f"save it as /etc/systemd/system/{service}, then: systemctl enable --now {service}",
        f"useradd --system {user} makes the user; it must be able to read the models, the file and its keys",
    ]


def own_command() -> tuple[str, ...]:
    """What starts this llamarack: for an offline install the name that stays the same over its versions."""
    installed = install_folder()
    if installed is not None:
        return (str(installed.parent.parent / "bin" / "llamarack"),)
    script = Path(sys.executable).parent / "llamarack"
    return (str(script),) if script.exists() else (sys.executable, "-m", "llamarack")


def _weights_bytes(deployment: Deployment) -> dict[Path, int]:
    paths = {model.path_of(group) for model in deployment.models for group in model.groups}
    return {path: read_model(path).weights_bytes for path in paths}


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
