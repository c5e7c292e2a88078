"""A deployment as it stands inside a container: paths, cards and address of the inside, and what is mounted. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from llamarack import config
from llamarack.config import Deployment, Gateway
from llamarack.errors import UsageError
from llamarack.ship.service import Cards, Timing, cards_of, model_paths, needs_shared_memory, renumbered, timing
from llamarack.ship.spread import alone, spread_of, with_address

USER_ID = 10001  # of the Containerfile
PORT = 8080
SHARED_MEMORY = "10g"  # what deployers of vLLM give it; /dev/shm of a container is 64 MiB otherwise
FILE = PurePosixPath("/etc/llamarack/rack.yaml")
NODE_FILE = PurePosixPath("/etc/llamarack/node.yaml")  # of the other nodes
STATE = PurePosixPath("/var/lib/llamarack")
CACHE = PurePosixPath("/var/cache/llamarack")
_MODELS = PurePosixPath("/models")
_SECRETS = PurePosixPath("/run/llamarack-secrets")
_SECRET_FIELDS = ("api_keys_file", "tls_cert", "tls_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNodes:
    """What runs on every machine but the first where one model spans `count` of them. `text`: their deployment file."""

    count: int
    text: str
    cards: Cards


@dataclass(frozen=True, slots=True, kw_only=True)
class Contained:
    """`text`: the deployment file of the inside. `models`: the folder on the host that is mounted on /models.

    `secrets`: files on the host by their place inside. `is_open`: reachable without keys; publish it on loopback only.
    `port`: on the host; `address`: of the gateway for a program inside. `others`: None where every model stands on one
    machine.
    """

    text: str
    models: Path
    secrets: Mapping[PurePosixPath, Path]
    cards: Cards
    timing: Timing
    port: int
    address: str
    has_shared_memory: bool
    has_tls: bool
    is_open: bool
    others: OtherNodes | None


def contained(
    deployment: Deployment,
    weights_bytes: Mapping[Path, int],
    *,
    node_0: str | None = None,
    is_on_host_network: bool = False,
) -> Contained:
    """Raises UsageError for what an image cannot have: an engine named by its place on this machine.

    `node_0`: the address of the first machine of a model that spans several; None: as the file has it.
    `is_on_host_network`: the container has no address of its own, so the gateway keeps that of the file.
    """
    _require_engines_of_the_image(deployment)
    spread = spread_of(deployment)
    if spread is not None and node_0 is not None:
        deployment = with_address(deployment, spread, node_0)
    cards = cards_of(deployment)
    root = _common_folder(model_paths(deployment))
    secrets = {
        _SECRETS / path.name: path
        for path in (getattr(deployment.gateway, name) for name in _SECRET_FIELDS)
        if path is not None
    }
    if len(secrets) != sum(getattr(deployment.gateway, name) is not None for name in _SECRET_FIELDS):
        raise UsageError(
            "gateway.api_keys_file, tls_cert and tls_key have the same last name", hint="rename one of them"
        )
    is_open = deployment.gateway.api_keys_file is None
    return Contained(
        text=_inside(renumbered(deployment, cards), root, is_open=is_open, keeps_address=is_on_host_network),
        models=root,
        secrets=secrets,
        cards=cards,
        timing=timing(deployment, weights_bytes),
        port=deployment.gateway.port or PORT,
        address=_reached_at(deployment.gateway) if is_on_host_network else f"127.0.0.1:{PORT}",
        has_shared_memory=needs_shared_memory(deployment),
        has_tls=deployment.gateway.tls_cert is not None,
        is_open=is_open,
        others=_others(deployment, root),
    )


def _reached_at(gateway: Gateway) -> str:
    host = "127.0.0.1" if gateway.host in {"0.0.0.0", "::"} else gateway.host
    return f"{f'[{host}]' if ':' in host else host}:{gateway.port or PORT}"


def _others(deployment: Deployment, root: Path) -> OtherNodes | None:
    spread = spread_of(deployment)
    if spread is None:
        return None
    part = alone(deployment, spread)
    cards = cards_of(part)
    text = _inside(renumbered(part, cards), root, is_open=True, keeps_address=True)
    return OtherNodes(count=spread.nodes - 1, text=text, cards=cards)


def _inside(deployment: Deployment, root: Path, *, is_open: bool, keeps_address: bool) -> str:
    """The same deployment with paths below /models and the gateway on every address of the container."""
    value: dict[str, Any] = yaml.safe_load(config.to_yaml(deployment))
    for model in value["models"]:
        for place in [model, *model.get("groups", [])]:
            for key in ("path", "tokenizer", "chat_template"):
                if isinstance(place.get(key), str) and os.path.isabs(place[key]):
                    place[key] = _moved(place[key], root)
        if "fallbacks" in model:
            model["fallbacks"] = [_moved(path, root) for path in model["fallbacks"]]
    gateway = value.setdefault("gateway", {})
    gateway |= {"port": deployment.gateway.port or PORT} if keeps_address else {"host": "0.0.0.0", "port": PORT}
    for name in _SECRET_FIELDS:
        if gateway.get(name) is not None:
            gateway[name] = str(_SECRETS / Path(gateway[name]).name)
    if is_open and not keeps_address:
        gateway["insecure"] = True  # inside; outside it is published on loopback, or the file said so itself
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    config.parse(text)  # what is written here is read there
    return text


def _moved(path: str, root: Path) -> str:
    return str(_MODELS / Path(path).relative_to(root))


def _common_folder(paths: list[Path]) -> Path:
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    if folder == Path("/"):
        raise UsageError(
            "the models have no folder in common but `/`, which is not mounted into a container",
            hint="put them below one folder, such as /data/models",
        )
    return folder


def _require_engines_of_the_image(deployment: Deployment) -> None:
    for model in deployment.models:
        for group in model.groups:
            for name in ("engine_python", "engine_binary"):
                if getattr(group, name) is not None:
                    raise UsageError(
                        f"model `{model.name}`: {name} names a place on this machine; an image has its own engines",
                        hint="llamarack bundle --engine vllm puts one into the image; leave the key out",
                    )
