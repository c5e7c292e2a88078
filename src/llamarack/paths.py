"""Where files are kept: state and sockets of racks, downloads, logs. Every folder is the user's own, mode 0700.

Logs: `$LLAMARACK_LOG_DIR`, else `$LOGS_DIRECTORY` (systemd), else beside the state. Downloads: `$LLAMARACK_CACHE_DIR`,
else `$CACHE_DIRECTORY` (systemd), else `$XDG_CACHE_HOME/llamarack`, else `~/.cache/llamarack`.
State: `--state-dir`, else `$LLAMARACK_STATE_DIR`, else `$RUNTIME_DIRECTORY` (systemd), else
`$XDG_RUNTIME_DIR/llamarack`, else `$XDG_STATE_HOME/llamarack`, else `~/.local/state/llamarack`.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llamarack.errors import UsageError

# sun_path holds 108 bytes with its end mark (unix(7)); the longest name below a rack's socket folder is
# `<replica>.engine.sock`.
SOCKET_PATH_MAX_BYTES = 107
_SOCKET_NAME_MAX_BYTES = 40
INSTALL_MARK = "llamarack-install.json"  # written by the installer of a bundle (ship/installer)
_RACK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RackPaths:
    """The folders and files of one rack. `sockets` lies elsewhere when `folder` is too long for a socket path."""

    name: str
    folder: Path
    sockets: Path
    logs: Path

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def admin_socket(self) -> Path:
        return self.sockets / "rack.sock"

    def keeper_socket(self, child: str) -> Path:
        return self.sockets / f"{child}.keeper.sock"

    def engine_socket(self, child: str) -> Path:
        return self.sockets / f"{child}.engine.sock"

    def log_of(self, child: str) -> Path:
        return self.logs / f"{child}.log"


def state_dir(given: Path | None = None) -> Path:
    """The folder of all racks of this user."""
    if given is not None:
        return given.expanduser().absolute()
    environment = os.environ
    if own := environment.get("LLAMARACK_STATE_DIR"):
        return Path(own).expanduser().absolute()
    if service := environment.get("RUNTIME_DIRECTORY"):
        return Path(service.split(":")[0])
    session = environment.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session) / "llamarack"
    home = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "llamarack"


def faults_dir() -> Path:
    """Records of faults of our own (`cli.last_resort`)."""
    return state_dir() / "faults"


def lasting_dir() -> Path:
    """What must outlive a logout, such as engines and what was measured of this machine; a rack's state may lie in
    memory. `$LLAMARACK_STATE_DIR`, else `$STATE_DIRECTORY` (systemd), else the user's state home.
    """
    if own := os.environ.get("LLAMARACK_STATE_DIR"):
        return Path(own).expanduser().absolute()
    if service := os.environ.get("STATE_DIRECTORY"):
        return Path(service.split(":")[0])
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "llamarack"


def cache_dir() -> Path:
    """Downloads that can be fetched again."""
    if own := os.environ.get("LLAMARACK_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if service := os.environ.get("CACHE_DIRECTORY"):
        return Path(service.split(":")[0])
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llamarack"


def log_dir() -> Path | None:
    """Where logs go when not beside the state; None: beside it."""
    if own := os.environ.get("LLAMARACK_LOG_DIR"):
        return Path(own).expanduser().absolute()
    if service := os.environ.get("LOGS_DIRECTORY"):
        return Path(service.split(":")[0])
    return None


def install_folder() -> Path | None:
    """The offline install that this interpreter belongs to: `engines/` lies in it, `../../models/` beside it."""
    folder = Path(sys.prefix).parent
    return folder if (folder / INSTALL_MARK).is_file() else None


def shipped_models_dir() -> Path | None:
    """Models that came with an offline install."""
    folder = install_folder()
    return folder.parent.parent / "models" if folder else None


def rack_paths(name: str, given_state_dir: Path | None = None) -> RackPaths:
    """Paths of the rack called `name`; creates nothing. Raises UsageError for a name that is not a file name."""
    if not _RACK_NAME.fullmatch(name):
        raise UsageError(
            f"rack name `{name}` is not letters, digits, dots, dashes and underscores (64 at most)",
            hint="--rack my-rack",
        )
    folder = state_dir(given_state_dir) / "racks" / name
    sockets = folder / "sockets"
    if len(os.fsencode(sockets)) + 1 + _SOCKET_NAME_MAX_BYTES > SOCKET_PATH_MAX_BYTES:
        short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
        sockets = Path(tempfile.gettempdir()) / f"llamarack-{os.getuid()}-{short}"
    elsewhere = log_dir()
    logs = folder / "logs" if elsewhere is None else elsewhere / name
    return RackPaths(name=name, folder=folder, sockets=sockets, logs=logs)


def slug(name: str) -> str:
    """A model name as part of a file name; two models never share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:12].strip("-._") or "model"
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:4]}"


def make_private(folder: Path) -> Path:
    """Create `folder` for this user alone. Raises UsageError when it belongs to somebody else or cannot be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or folder.is_symlink():
            raise UsageError(f"folder `{folder}` belongs to another user", hint="--state-dir names another one")
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(
            f"folder `{folder}` cannot be made: {error.strerror}", hint="--state-dir names another one"
        ) from error
    return folder
