"""The steps that fill a version: does the machine fit, environments from wheels, models, and one start of each."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarack.ship.installer import program
from llamarack.ship.installer.contents import READ_BYTES, SCHEMA_VERSION, Bundle, sha256_of
from llamarack.ship.installer.prefix import MARK, Prefix
from llamarack.ship.installer.refusal import Refusal, tell

_PIP_TIMEOUT_S = 3600.0
_START_TIMEOUT_S = 600.0


def require_machine(record: dict[str, Any]) -> None:
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


def require_room(prefix: Prefix, bundle: Bundle, record: dict[str, Any]) -> None:
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


def fill(bundle: Bundle, record: dict[str, Any], version: Path, prefix: Prefix) -> None:
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
    shutil.copyfile(bundle.folder / program.FILE, version / program.FILE)
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
            while chunk := reader.read(READ_BYTES):
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
