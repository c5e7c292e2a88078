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
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        "LimitCORE=0",
        "UMask=0077",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        *(_of_system(unit) if unit.user else []),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if unit.user else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def _of_system(unit: Unit) -> list[str]:
    """What a user's own manager cannot give. /tmp stays writable: the lock that serialises loads is everybody's."""
    port = "CAP_NET_BIND_SERVICE" if 0 < unit.port < _PRIVILEGED_PORTS else ""
    return [
        f"User={unit.user}",
        "# Engines compile into their home and cache.",
        f"Environment=HOME=%S/{unit.name} XDG_CACHE_HOME=%C/{unit.name}",
        "ProtectSystem=strict",
        "ReadWritePaths=/tmp",
        "ProtectControlGroups=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        f"CapabilityBoundingSet={port}",
        f"AmbientCapabilities={port}",
    ]


def _quoted(word: str) -> str:
    """For a unit file: `%` starts a specifier, `$` a variable (systemd.service(5), command lines)."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if any(character in text for character in " \t\"\\';") else text
