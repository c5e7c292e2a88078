"""The folder that everything goes into: its versions, which of them is in use, and what may be removed."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamarack.ship.installer.refusal import Refusal

LOCK = ".llamarack-install.lock"  # also the sign that a folder is one of ours
MARK = "llamarack-install.json"  # written last: a version without it is an unfinished one


class Prefix:
    """The folder that everything goes into. Held by one installer at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions = folder / "versions"
        self.models = folder / "models"

    @contextlib.contextmanager
    def held(self, *, create: bool) -> Iterator[None]:
        lock = self.folder / LOCK
        if not create and not lock.exists():
            raise Refusal(f"nothing is installed in `{self.folder}`", hint="--prefix DIR names the folder")
        try:
            if not lock.exists() and self.folder.exists() and any(self.folder.iterdir()):
                # What lies in it is somebody else's, and `versions` or `models` of theirs must not become ours.
                raise Refusal(
                    f"`{self.folder}` is not empty and no install of llamarack",
                    hint=f"--prefix {self.folder / 'llamarack'}",
                )
            self.versions.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise Refusal(
                f"`{self.folder}` cannot be written: {error.strerror}",
                hint="--prefix DIR names a folder of your own; root is not needed",
                exit_code=3,
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Refusal(f"another installer works in `{self.folder}`", hint="wait until it is done") from None
            yield
        finally:
            os.close(descriptor)

    def linked(self, name: str) -> Path | None:
        """The version that a link names, or None."""
        link = self.folder / name
        return self.versions / os.path.basename(os.readlink(link)) if link.is_symlink() else None

    def link(self, name: str, version: Path | None) -> None:
        """Replaces the link in one step, so that `current` names a whole version at every moment."""
        link = self.folder / name
        if version is None:
            link.unlink(missing_ok=True)
            return
        fresh = self.folder / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(Path("versions") / version.name)
        os.replace(fresh, link)

    def installed(self) -> list[Path]:
        return sorted(path for path in self.versions.iterdir() if (path / MARK).is_file())

    def remove(self, versions: Sequence[Path]) -> None:
        """Deletes versions and the models that they alone brought; what else lies beside those is not ours.

        Raises Refusal while something runs from them.
        """
        require_idle(versions)
        installed = self.installed()
        brought = {name for path in installed if path in versions for name in _models_of(path)}
        needed = {name for path in installed if path not in versions for name in _models_of(path)}
        for name in brought - needed:
            delete(self.models / name)
        for version in versions:
            delete(version)


def _models_of(version: Path) -> list[str]:
    names: list[str] = json.loads((version / MARK).read_text())["models"]
    return names


def require_idle(versions: Sequence[Path]) -> None:
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        for version in versions:
            if any(word.startswith(os.fsencode(version) + b"/") for word in words[:2]):
                raise Refusal(
                    f"process {entry} runs from `{version}`",
                    hint="llamarack stop ends a rack; then try again",
                )


def delete(path: Path) -> None:
    """Also what was made read-only after the install."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o755)
    shutil.rmtree(path)
