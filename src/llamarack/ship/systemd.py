"""A systemd unit for a deployment file. Pure.

Type=notify: started when the replicas are ready, watched by signs of life from the supervisor's loop, and stopped with
time for the drain. KillMode=process, because the supervisor ends its engines itself, in order; when it is killed, the
next one takes them back without loading a model, and if none comes their keepers end them within 30 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llamarack.ship.service import Timing

_WATCHDOG_S = 60  # a supervisor that reads a large header on a slow disk is not dead
_PRIVILEGED_PORTS = 1024
_NODE_STOP_S = 30  # vLLM's ranks end within seconds once they are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """`user`: who it runs as; None: a unit of the calling user, for `systemctl --user`."""

    command: tuple[str, ...]
    file: Path
    rack: str
    port: int
    user: str | None
    timing: Timing
    models: tuple[Path, ...]

    @property
    def name(self) -> str:
        return f"llamarack-{self.rack}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnit:
    """Another server's part of a model that spans several. `rank`: which; `user` as in Unit."""

    command: tuple[str, ...]
    file: Path
    rack: str
    rank: int
    user: str | None
    models: tuple[Path, ...]

    @property
    def name(self) -> str:
        return f"llamarack-{self.rack}-node-{self.rank}"


def node_unit_text(unit: NodeUnit) -> str:
    """It becomes the engine itself, which ends when node 0 is gone; then the next one waits for the next node 0."""
    run = " ".join(map(_quoted, [*unit.command, "node", str(unit.file), "--node-rank", str(unit.rank)]))
    lines = [
        "[Unit]",
        f"Description=llamarack, node {unit.rank} of rack {unit.rack}",
        "Wants=network-online.target",
        "After=network-online.target local-fs.target nvidia-persistenced.service",
        *(f"RequiresMountsFor={_quoted(str(path))}" for path in unit.models),
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={run}",
        "# This server's address on the network between the nodes; vLLM picks one by itself otherwise.",
        f"EnvironmentFile=-/etc/default/{unit.name}",
        "Restart=always",
        "RestartSec=5",
        "# A wrong file or rank, a machine that lacks something, what does not fit: it would end again.",
        "RestartPreventExitStatus=2 3 4",
        f"TimeoutStopSec={_NODE_STOP_S}",
        f"StateDirectory={unit.name}",
        f"CacheDirectory={unit.name}",
        f"Environment=LLAMARACK_STATE_DIR=%S/{unit.name} LLAMARACK_CACHE_DIR=%C/{unit.name}",
        *_COMMON,
        *(_of_system(unit.name, unit.user, port=0) if unit.user else []),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if unit.user else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


_COMMON = (
    "LimitNOFILE=65536",
    "LimitMEMLOCK=infinity",
    "LimitCORE=0",
    "UMask=0077",
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
)


def unit_text(unit: Unit) -> str:
    serve = " ".join(map(_quoted, [*unit.command, "serve", str(unit.file), "--rack", unit.rack]))
    reload = " ".join(map(_quoted, [*unit.command, "reload", str(unit.file), "--rack", unit.rack]))
    lines = [
        "[Unit]",
        f"Description=llamarack, rack {unit.rack}",
        "After=network.target local-fs.target nvidia-persistenced.service",
        *(f"RequiresMountsFor={_quoted(str(path))}" for path in unit.models),
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={serve}",
        "# One replica at a time; a change that does not become ready is taken back, and the reload fails.",
        f"ExecReload={reload}",
        "# Loads go one after the other: the sum of their deadlines, by the size of the weights.",
        f"TimeoutStartSec={unit.timing.start_s}",
        "# supervise.drain_s, and the end of all processes.",
        f"TimeoutStopSec={unit.timing.stop_s}",
        f"WatchdogSec={_WATCHDOG_S}",
        "# The supervisor ends its engines itself; killed, it takes them back when it is started again.",
        "KillMode=process",
        "Restart=on-failure",
        "RestartSec=2",
        "# A wrong file, a machine that lacks something, what does not fit or does not start: it would end again.",
        "RestartPreventExitStatus=2 3 4 5",
        "SuccessExitStatus=143 130",
        f"RuntimeDirectory={unit.name}",
        "RuntimeDirectoryMode=0700",
        "RuntimeDirectoryPreserve=restart",
        f"StateDirectory={unit.name}",
        f"CacheDirectory={unit.name}",
        f"LogsDirectory={unit.name}",
        *_COMMON,
        *(_of_system(unit.name, unit.user, port=unit.port) if unit.user else []),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if unit.user else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def _of_system(name: str, user: str, *, port: int) -> list[str]:
    """What a user's own manager cannot give. /tmp stays writable: the lock that serialises loads is everybody's."""
    right = "CAP_NET_BIND_SERVICE" if 0 < port < _PRIVILEGED_PORTS else ""
    return [
        f"User={user}",
        "# Engines compile into their home and cache.",
        f"Environment=HOME=%S/{name} XDG_CACHE_HOME=%C/{name}",
        "ProtectSystem=strict",
        "ReadWritePaths=/tmp",
        "ProtectControlGroups=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        f"CapabilityBoundingSet={right}",
        f"AmbientCapabilities={right}",
    ]


def _quoted(word: str) -> str:
    """For a unit file: `%` starts a specifier, `$` a variable (systemd.service(5), command lines)."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if any(character in text for character in " \t\"\\';") else text
