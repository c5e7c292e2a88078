"""A Compose file (compose-spec) for a deployment. Pure."""

from __future__ import annotations

from typing import Any

import yaml

from llamarack.ship.container import CACHE, FILE, PORT, SHARED_MEMORY, STATE, USER_ID, Contained

_HEAD = """\
# Written by `llamarack export compose`. The image is made from an offline bundle (its Containerfile); the state and
# what engines compile stay in volumes. Validated against the Compose specification; not started by llamarack's tests.
"""


def compose_text(inside: Contained, *, image: str, owner: tuple[int, int] | None) -> str:
    """`owner`: user and group that can read the mounted keys; None: the image's own user."""
    scheme = "https" if inside.has_tls else "http"
    probe = (
        "import ssl, urllib.request as u; "
        f"u.urlopen('{scheme}://127.0.0.1:{PORT}/ready', timeout=5, context=ssl._create_unverified_context())"
    )
    service: dict[str, Any] = {
        "image": image,
        "command": ["serve", str(FILE)],
        "user": "{}:{}".format(*(owner or (USER_ID, USER_ID))),
        "restart": "unless-stopped",
        # Without keys only this machine may reach it.
        "ports": [f"{'127.0.0.1:' if inside.is_open else ''}{inside.port}:{PORT}"],
        "configs": [{"source": "rack", "target": str(FILE)}],
        "volumes": [
            {"type": "bind", "source": str(inside.models), "target": "/models", "read_only": True},
            *(
                {"type": "bind", "source": str(source), "target": str(target), "read_only": True}
                for target, source in inside.secrets.items()
            ),
            {"type": "volume", "source": "state", "target": str(STATE)},
            {"type": "volume", "source": "cache", "target": str(CACHE)},
        ],
        "environment": {"XDG_CACHE_HOME": str(CACHE), "TMPDIR": "/tmp"},
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{inside.timing.stop_s}s",
        "healthcheck": {
            "test": ["CMD", "/opt/llamarack/current/python/bin/python", "-I", "-c", probe],
            "interval": "10s",
            "timeout": "10s",
            "retries": 6,
            "start_period": f"{inside.timing.start_s}s",
        },
    }
    if inside.has_shared_memory:
        service["shm_size"] = SHARED_MEMORY
    if inside.cards.count:
        named = inside.cards.named
        device: dict[str, Any] = {"driver": "nvidia", "capabilities": ["gpu"]}
        device |= {"device_ids": list(map(str, named))} if named else {"count": inside.cards.count}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    value = {
        "name": "llamarack",
        "services": {"llamarack": service},
        "configs": {"rack": {"content": inside.text.replace("$", "$$")}},  # `$` begins a variable there
        "volumes": {"state": {}, "cache": {}},
    }
    return _HEAD + _dump(value)


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
