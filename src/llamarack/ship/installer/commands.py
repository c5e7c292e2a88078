"""What an installer does: install, accept, undo, uninstall."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from llamarack.ship.installer import program
from llamarack.ship.installer.contents import SUMS, Bundle
from llamarack.ship.installer.filling import fill, require_machine, require_room
from llamarack.ship.installer.prefix import LOCK, MARK, Prefix, delete, require_idle
from llamarack.ship.installer.refusal import Refusal, tell


def install(bundle: Bundle, prefix: Prefix, expected: str | None) -> None:
    """Verifies, installs beside what is there, starts it once, and only then makes it the current version."""
    started = time.monotonic()
    if expected is not None and bundle.digest != expected:
        raise Refusal(
            f"the SHA-256 of {SUMS} is {bundle.digest}, --expect says {expected}",
            hint="this is not the bundle that was made; copy it again",
        )
    tell(f"verifying {len(bundle.sums)} files")
    bundle.verify(models=False)
    record = bundle.record()
    require_machine(record)
    name = f"{record['llamarack']}-{bundle.digest[:8]}"
    with prefix.held(create=True):
        version = prefix.versions / name
        for unfinished in prefix.versions.iterdir():
            if not (unfinished / MARK).is_file():
                delete(unfinished)
        if not version.exists():
            require_room(prefix, bundle, record)
            try:
                fill(bundle, record, version, prefix)
            except BaseException:
                delete(version)
                raise
        current = prefix.linked("current")
        if current is not None and current != version and prefix.linked("previous") is None:
            prefix.link("previous", current)
        if prefix.linked("previous") == version:
            prefix.link("previous", None)
        prefix.link("current", version)
        _write_commands(prefix)
    _tell_installed(prefix, record, time.monotonic() - started)


def accept(prefix: Prefix) -> None:
    """Removes what was kept beside the current version."""
    with prefix.held(create=False):
        current = prefix.linked("current")
        others = [path for path in prefix.installed() if path != current]
        prefix.remove(others)
        prefix.link("previous", None)
    tell(f"accepted {current.name if current else 'nothing'}; removed {', '.join(p.name for p in others) or 'nothing'}")


def undo(prefix: Prefix) -> None:
    """Goes back to the version before and removes the newer ones."""
    with prefix.held(create=False):
        previous = prefix.linked("previous")
        if previous is None:
            raise Refusal(
                "there is no earlier version: the current one is the first, or was accepted",
                hint=f"{prefix.folder}/bin/llamarack-install uninstall removes everything",
            )
        newer = [path for path in prefix.installed() if path != previous]
        require_idle(newer)
        prefix.link("current", previous)
        prefix.link("previous", None)
        prefix.remove(newer)
    tell(f"back to {previous.name}; removed {', '.join(path.name for path in newer)}")


def uninstall(prefix: Prefix) -> None:
    """Removes everything that installs made in the prefix, and the prefix itself if nothing else is in it."""
    with prefix.held(create=False):
        prefix.remove(list(prefix.versions.iterdir()))
        for name in ("llamarack", "llamarack-install"):
            (prefix.folder / "bin" / name).unlink(missing_ok=True)
        for link in ("current", "previous"):
            prefix.link(link, None)
    (prefix.folder / LOCK).unlink(missing_ok=True)
    for folder in (prefix.folder / "bin", prefix.versions, prefix.models, prefix.folder):
        with contextlib.suppress(OSError):
            folder.rmdir()
    tell(f"removed from {prefix.folder}; state, logs and caches of users are left alone")


def _write_commands(prefix: Prefix) -> None:
    """PREFIX/bin: names that stay the same over all versions."""
    folder = prefix.folder / "bin"
    folder.mkdir(exist_ok=True)
    fresh = folder / ".llamarack.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(Path("..") / "current" / "bin" / "llamarack")
    os.replace(fresh, folder / "llamarack")
    script = folder / ".llamarack-install.new"
    script.write_text(
        "#!/bin/sh\n"
        'here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)\n'
        f'exec "$here/current/python/bin/python" -I "$here/current/{program.FILE}" "$@" --prefix "$here"\n'
    )
    script.chmod(0o755)
    os.replace(script, folder / "llamarack-install")


def _tell_installed(prefix: Prefix, record: dict[str, Any], took_s: float) -> None:
    previous = prefix.linked("previous")
    tell(f"installed llamarack {record['llamarack']} in {took_s:.0f} s")
    if previous is not None:
        tell(f"{previous.name} is kept; {prefix.folder}/bin/llamarack-install accept removes it, undo goes back to it")
    for name in record["models"]:
        tell(f"model: {prefix.models / name}")
    tell(f"next: {prefix.folder}/bin/llamarack check")
    print(prefix.folder / "bin" / "llamarack")
