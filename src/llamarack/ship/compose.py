"""A Compose file (compose-spec) for a deployment. Pure."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from llamarack.ship.container import CACHE, FILE, NODE_FILE, PORT, SHARED_MEMORY, STATE, USER_ID, Contained
from llamarack.ship.service import Cards

_HEAD = """\
# Written by `llamarack export compose`. The image is made from an offline bundle (its Containerfile); the state and
# what engines compile stay in volumes. Validated against the Compose specification; not started by llamarack's tests.
"""


_SPREAD = """\
# One model spans {count} servers, each with a file of its own: this is node {rank}. Not run on several servers by
# llamarack's tests. vLLM chooses ports by itself, so the containers use the host's network; its traffic there is
# neither encrypted nor authenticated. VLLM_HOST_IP: this server's address on the network between them. For InfiniBand
# add, as vLLM says: devices: [/dev/infiniband], cap_add: [IPC_LOCK], ulimits: {{memlock: -1}}.
"""


def compose_text(inside: Contained, *, image: str, owner: tuple[int, int] | None) -> str:
    """`owner`: user and group that can read the mounted keys; None: the image's own user."""
    service = {
        **_service(inside, image, owner, ["serve", str(FILE)]),
        "volumes": [
            _bound(inside.models, "/models"),
            *(_bound(source, target) for target, source in inside.secrets.items()),
            *_KEPT,
        ],
        "healthcheck": _healthcheck(inside),
        **_with_cards(inside.cards),
    }
    if inside.others is None:
        # Without keys only this machine may reach it.
        service["ports"] = [f"{'127.0.0.1:' if inside.is_open else ''}{inside.port}:{PORT}"]
    return _HEAD + _spread_head(inside, 0) + _dump(_file(service, inside.text))


def compose_node_text(inside: Contained, rank: int, *, image: str, owner: tuple[int, int] | None) -> str:
    """The file of another server than the first, where one model spans several."""
    assert inside.others is not None
    service = {
        **_service(inside, image, owner, ["node", str(NODE_FILE), "--node-rank", str(rank)], file=NODE_FILE),
        # It ends when node 0 is gone, and waits for the next one.
        "restart": "always",
        "volumes": [_bound(inside.models, "/models"), *_KEPT],
        **_with_cards(inside.others.cards),
    }
    return _HEAD + _spread_head(inside, rank) + _dump(_file(service, inside.others.text))


_KEPT = (
    {"type": "volume", "source": "state", "target": str(STATE)},
    {"type": "volume", "source": "cache", "target": str(CACHE)},
)


def _service(
    inside: Contained, image: str, owner: tuple[int, int] | None, command: list[str], *, file: PurePosixPath = FILE
) -> dict[str, Any]:
    service: dict[str, Any] = {
        "image": image,
        "command": command,
        "user": "{}:{}".format(*(owner or (USER_ID, USER_ID))),
        "restart": "unless-stopped",
        "configs": [{"source": "rack", "target": str(file)}],
        "environment": {"XDG_CACHE_HOME": str(CACHE), "TMPDIR": "/tmp"},
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{inside.timing.stop_s}s",
    }
    if inside.others is not None:
        service["network_mode"] = "host"
        service["environment"]["VLLM_HOST_IP"] = "${VLLM_HOST_IP:-}"
    if inside.has_shared_memory:
        service["shm_size"] = SHARED_MEMORY
    return service


def _healthcheck(inside: Contained) -> dict[str, Any]:
    url = f"{'https' if inside.has_tls else 'http'}://{inside.address}/ready"
    probe = f"import ssl, urllib.request as u; u.urlopen('{url}', timeout=5, context=ssl._create_unverified_context())"
    return {
        "test": ["CMD", "/opt/llamarack/current/python/bin/python", "-I", "-c", probe],
        "interval": "10s",
        "timeout": "10s",
        "retries": 6,
        "start_period": f"{inside.timing.start_s}s",
    }


def _with_cards(cards: Cards) -> dict[str, Any]:
    if not cards.count:
        return {}
    device: dict[str, Any] = {"driver": "nvidia", "capabilities": ["gpu"]}
    device |= {"device_ids": list(map(str, cards.named))} if cards.named else {"count": cards.count}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _bound(source: Path, target: PurePosixPath | str) -> dict[str, Any]:
    return {"type": "bind", "source": str(source), "target": str(target), "read_only": True}


def _file(service: dict[str, Any], text: str) -> dict[str, Any]:
    return {
        "name": "llamarack",
        "services": {"llamarack": service},
        "configs": {"rack": {"content": text.replace("$", "$$")}},  # `$` begins a variable there
        "volumes": {"state": {}, "cache": {}},
    }


def _spread_head(inside: Contained, rank: int) -> str:
    return "" if inside.others is None else _SPREAD.format(count=inside.others.count + 1, rank=rank)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such, so that the deployment file in it can be read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def dump_all(values: list[Any]) -> str:
    return "---\n".join(map(_dump, values))
