"""Installs a bundle on a server without a network: `install.sh` runs this file, with a bare Python 3.11 or newer.

Standard library only. Everything goes into one folder, the prefix:

    PREFIX/bin/llamarack            what to call; PREFIX/bin/llamarack-install accept | undo | uninstall
    PREFIX/current -> versions/X    the version in use
    PREFIX/previous -> versions/W   the one before, kept until `accept`
    PREFIX/versions/X/              python/ (a virtual environment), engines/NAME/, bin/, llamarack-install.json
    PREFIX/models/                  shared by the versions

After that nothing in it is written any more: it may be read-only and belong to another user.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

SUMS = "SHA256SUMS"
MARK = "llamarack-install.json"  # written last: a version without it is an unfinished one
SCHEMA_VERSION = 1
_READ_BYTES = 4 * 1024**2
_PIP_TIMEOUT_S = 3600.0
_START_TIMEOUT_S = 600.0


class Refusal(Exception):
    """`exit_code`: 2 the bundle or the command line, 3 the machine, 5 what was installed does not start."""

    def __init__(self, message: str, *, hint: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# -- the bundle ---------------------------------------------------------------------------------------------------


class Bundle:
    """A folder made by `llamarack bundle`. Nothing of it is used before its hash was compared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            text = (folder / SUMS).read_bytes()
        except OSError as error:
            raise Refusal(
                f"`{folder / SUMS}` cannot be read: {error.strerror}", hint="copy the whole bundle again"
            ) from None
        self.digest = hashlib.sha256(text).hexdigest()
        self.sums: dict[str, str] = {}
        for line in text.decode().splitlines():
            digest, _, name = line.partition("  ")
            self.sums[name] = digest

    def verify(self, *, models: bool) -> None:
        """Raises Refusal naming every file that is missing, changed or foreign. Models are left out on demand: an
        install compares them while it copies them.
        """
        there = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}
        faults = [f"{name}: missing" for name in self.sums if name not in there]
        faults += [f"{name}: not part of the bundle" for name in sorted(there - {*self.sums, SUMS})]
        for name, digest in self.sums.items():
            is_checked = name in there and (models or not name.startswith("models/"))
            if is_checked and sha256_of(self.folder / name) != digest:
                faults.append(f"{name}: its SHA-256 is another one")
        if faults:
            raise Refusal("the bundle is damaged: " + "; ".join(faults[:10]), hint="copy it again, or make a new one")

    def record(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.folder / "bundle.json").read_text())
        if value["schema_version"] != SCHEMA_VERSION:
            raise Refusal(f"bundle.json has format {value['schema_version']}, {SCHEMA_VERSION} is read", hint="")
        return value


# -- the prefix ---------------------------------------------------------------------------------------------------


class Prefix:
    """The folder that everything goes into. Held by one installer at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.versions = folder / "versions"
        self.models = folder / "models"

    @contextlib.contextmanager
    def held(self, *, create: bool) -> Iterator[None]:
        if not create and not self.versions.is_dir():
            raise Refusal(f"nothing is installed in `{self.folder}`", hint="--prefix DIR names the folder")
        try:
            self.versions.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        """Deletes versions and the models that only they name. Raises Refusal while something runs from them."""
        _require_idle(versions)
        kept = [path for path in self.installed() if path not in versions]
        names = {name for path in kept for name in json.loads((path / MARK).read_text())["models"]}
        for version in versions:
            _delete(version)
        if self.models.is_dir():
            for model in self.models.iterdir():
                if model.name not in names:
                    _delete(model)


def _require_idle(versions: Sequence[Path]) -> None:
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


def _delete(path: Path) -> None:
    """Also what was made read-only after the install."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o755)
    shutil.rmtree(path)


# -- commands -----------------------------------------------------------------------------------------------------


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
    _require_machine(record)
    name = f"{record['llamarack']}-{bundle.digest[:8]}"
    with prefix.held(create=True):
        version = prefix.versions / name
        for unfinished in prefix.versions.iterdir():
            if not (unfinished / MARK).is_file():
                _delete(unfinished)
        if not version.exists():
            _require_room(prefix, bundle, record)
            try:
                _fill(bundle, record, version, prefix)
            except BaseException:
                _delete(version)
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
        _require_idle(newer)
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
    (prefix.folder / ".lock").unlink(missing_ok=True)
    for folder in (prefix.folder / "bin", prefix.versions, prefix.models, prefix.folder):
        with contextlib.suppress(OSError):
            folder.rmdir()
    tell(f"removed from {prefix.folder}; state, logs and caches of users are left alone")


# -- steps of an install ------------------------------------------------------------------------------------------


def _require_machine(record: dict[str, Any]) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != record["python"]:
        raise Refusal(
            f"the bundle is for Python {record['python']}, this is {here}",
            hint=f"llamarack bundle --python {here}",
            exit_code=3,
        )
    if platform.machine() != record["machine"]:
        raise Refusal(
            f"the bundle is for {record['machine']}, this machine is {platform.machine()}",
            hint=f"llamarack bundle --platform manylinux_2_28_{platform.machine()}",
            exit_code=3,
        )
    library, version = platform.libc_ver()
    if library == "glibc" and int(version.split(".")[1]) < int(record["glibc"].split(".")[1]):
        raise Refusal(
            f"the bundle needs glibc {record['glibc']}, this machine has {version}",
            hint=f"llamarack bundle --platform manylinux_{version.replace('.', '_')}_{platform.machine()}",
            exit_code=3,
        )


def _require_room(prefix: Prefix, bundle: Bundle, record: dict[str, Any]) -> None:
    environments = [record["app"], *record["engines"]]
    needed = sum(each["unpacked_bytes"] for each in environments) * 5 // 4  # and what Python compiles
    for name in bundle.sums:
        if name.startswith("models/") and not (prefix.folder / name).exists():
            needed += (bundle.folder / name).stat().st_size
    free = shutil.disk_usage(prefix.folder).free
    if free < needed:
        raise Refusal(
            f"`{prefix.folder}` has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed",
            hint="--prefix DIR names a folder on a larger disk",
            exit_code=3,
        )


def _fill(bundle: Bundle, record: dict[str, Any], version: Path, prefix: Prefix) -> None:
    version.mkdir()
    tell(f"installing llamarack {record['llamarack']}")
    python = _environment(bundle, version / "python", record["app"]["lock"])
    _run([str(python), "-I", "-m", "llamarack", "--version"], "llamarack does not start")
    for engine in record["engines"]:
        tell(f"installing {engine['name']} and starting it once")
        place = version / "engines" / engine["name"]
        place.parent.mkdir(exist_ok=True)
        _environment(bundle, place, engine["lock"])
        finish = [str(python), "-I", "-m", "llamarack.ship.finish_engine", str(place), json.dumps(engine["recipe"])]
        _run(finish, f"{engine['name']} does not start")
    _copy_models(bundle, prefix)
    (version / "bin").mkdir()
    (version / "bin" / "llamarack").symlink_to(Path("..") / "python" / "bin" / "llamarack")
    shutil.copyfile(bundle.folder / "install.py", version / "install.py")
    mark = {
        "schema_version": SCHEMA_VERSION,
        "llamarack": record["llamarack"],
        "bundle_sha256": bundle.digest,
        "engines": [engine["name"] for engine in record["engines"]],
        "models": record["models"],
        "prefix": str(prefix.folder),
    }
    (version / MARK).write_text(json.dumps(mark, indent=1) + "\n")


def _environment(bundle: Bundle, place: Path, lock: str) -> Path:
    """A virtual environment with exactly what `lock` lists. pip runs from its wheel: the system may have none."""
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    (pip,) = (bundle.folder / "wheels").glob("pip-*.whl")
    options = ["--no-index", "--no-deps", "--require-hashes", "--find-links", str(bundle.folder / "wheels")]
    options += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--quiet", "--progress-bar=off"]
    command = [str(python), "-I", f"{pip}/pip", "install", *options, "-r", str(bundle.folder / lock)]
    # The user's own pip settings are for the network; here they could only mislead it.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    _run(command, f"installing {lock} failed", environment={**kept, "PIP_CONFIG_FILE": os.devnull})
    return python


def _copy_models(bundle: Bundle, prefix: Prefix) -> None:
    """Models lie beside the versions. One that is there with the same contents is left; another one is not replaced."""
    for name, digest in bundle.sums.items():
        if not name.startswith("models/"):
            continue
        target = prefix.folder / name
        if target.exists():
            if sha256_of(target) != digest:
                raise Refusal(
                    f"`{target}` is there with other contents, and the version in use may need it",
                    hint="give the new model another name and make the bundle again",
                )
            continue
        tell(f"copying {name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(target.name + ".new")
        copied = hashlib.sha256()
        with open(bundle.folder / name, "rb") as reader, open(fresh, "wb") as writer:
            while chunk := reader.read(_READ_BYTES):
                copied.update(chunk)
                writer.write(chunk)
        if copied.hexdigest() != digest:
            fresh.unlink()
            raise Refusal(f"the bundle is damaged: {name}: its SHA-256 is another one", hint="copy it again")
        os.replace(fresh, target)


def _run(command: Sequence[str], fault: str, *, environment: dict[str, str] | None = None) -> None:
    timeout_s = _PIP_TIMEOUT_S if "install" in command else _START_TIMEOUT_S
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"{fault}: not done within {timeout_s:.0f} s", hint=" ".join(command), exit_code=5) from None
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
        said = errors[0] if errors else f"exit code {done.returncode}"
        raise Refusal(f"{fault}: {said}", hint=" ".join(command), exit_code=5)


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
        'exec "$here/current/python/bin/python" -I "$here/current/install.py" "$@" --prefix "$here"\n'
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


def _default_prefix() -> Path:
    return Path("/opt/llamarack") if os.getuid() == 0 else Path.home() / ".local" / "lib" / "llamarack"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="install.sh", description="Install llamarack without a network.")
    parser.add_argument(
        "command", nargs="?", default="install", choices=["install", "verify", "accept", "undo", "uninstall"]
    )
    parser.add_argument(
        "--prefix", type=Path, default=_default_prefix(), help="the one folder that is written (default: %(default)s)"
    )
    parser.add_argument("--expect", metavar="SHA256", help=f"what `llamarack bundle` printed for {SUMS}")
    return parser.parse_args(arguments)


def main() -> None:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    os.umask(0o022)  # others may run what one user installed
    prefix = Prefix(options.prefix.expanduser().absolute())
    try:
        match options.command:
            case "accept":
                accept(prefix)
            case "undo":
                undo(prefix)
            case "uninstall":
                uninstall(prefix)
            case command:
                bundle = Bundle(Path(__file__).absolute().parent)
                if command == "install":
                    install(bundle, prefix, options.expect)
                else:
                    bundle.verify(models=True)
                    tell(f"{len(bundle.sums)} files are as they were made; SHA-256 of {SUMS}: {bundle.digest}")
    except Refusal as refusal:
        tell(f"error: {refusal}\nhint: {refusal.hint}")
        sys.exit(refusal.exit_code)
    except KeyboardInterrupt:
        tell("interrupted; the version in use is as it was")
        sys.exit(130)
    except OSError as error:
        tell(f"error: `{error.filename}`: {error.strerror}\nhint: check space and permissions there")
        sys.exit(3)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
