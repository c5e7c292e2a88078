"""Every wheel that an environment needs, for the target's Python and platform, and the list that pins them by hash.

pip judges requirements' markers by the interpreter that runs it, also when it downloads for another one. So the
wheels' own metadata are read afterwards, and what the target needs besides is fetched as well.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from llamarack.errors import UsageError
from llamarack.ship.pip import run_pip
from llamarack.ship.target import Target

_ROUNDS = 6  # of fetching what was still missing; each goes one step deeper into the requirements
_READ_BYTES = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """`unpacked_bytes`: what it takes once it is installed."""

    path: Path
    name: str
    version: str
    sha256: str
    unpacked_bytes: int


def collect(
    requirements: Sequence[str],
    target: Target,
    folder: Path,
    *,
    without: Collection[str] = (),
    tell: Callable[[str], None],
) -> list[Wheel]:
    """Fetches the wheels of `requirements` (names or wheel files) and all they need into the empty `folder`.

    `without`: packages that are left out again. Raises UsageError naming what pip said or what stayed missing.
    """
    wanted = list(requirements)
    for _ in range(_ROUNDS):
        _fetch(wanted, target, folder, tell)
        missing = missing_requirements(_metadata_of(folder), _named(requirements), target.markers)
        if not missing:
            dropped = {canonicalize_name(name) for name in without}
            return [wheel for wheel in map(read_wheel, sorted(folder.glob("*.whl"))) if wheel.name not in dropped]
        wanted = missing
    raise UsageError(
        f"the requirements of {', '.join(requirements)} do not come to an end: {', '.join(missing)}",
        hint="name another version of the engine",
    )


def lock_text(wheels: Sequence[Wheel]) -> str:
    """A requirements file for `pip install --no-deps --require-hashes`."""
    return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)


def missing_requirements(
    metadata: Mapping[str, Sequence[str]], roots: Sequence[str], markers: Mapping[str, str]
) -> list[str]:
    """Requirements that hold in `markers` and that no wheel meets. Pure.

    `metadata`: Requires-Dist of each wheel by canonical name.
    """
    missing: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(root) for root in roots]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name not in metadata:
            missing[f"{requirement.name}{_extras(requirement)}{requirement.specifier}"] = None
            continue
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = [Requirement(text) for text in metadata[name]]
            queue += [one for one in needed if one.marker is None or one.marker.evaluate({**markers, "extra": extra})]
    return list(missing)


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _fetch(wanted: Sequence[str], target: Target, folder: Path, tell: Callable[[str], None]) -> None:
    if target.is_here:  # source packages are built here, so that the server needs no compiler
        arguments = ["wheel", "--wheel-dir", str(folder), *wanted]
    else:
        arguments = ["download", "--dest", str(folder), *target.pip_options, *wanted]
    shown = ", ".join(Path(one).name for one in wanted)
    run_pip([*arguments, "--find-links", str(folder)], what=f"fetching {shown}", tell=tell)


def _named(requirements: Sequence[str]) -> list[str]:
    """Wheel files by their names: requirements of the same thing."""
    return [str(parse_wheel_filename(Path(one).name)[0]) if one.endswith(".whl") else one for one in requirements]


def _metadata_of(folder: Path) -> dict[str, list[str]]:
    found = {}
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            headers = BytesParser().parsebytes(archive.read(name), headersonly=True)
        found[str(_name_and_version(path)[0])] = headers.get_all("Requires-Dist") or []
    return found


def _name_and_version(path: Path) -> tuple[str, str]:
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UsageError(f"`{path.name}` is not named like a wheel", hint="give it back its original name") from error
    return name, str(version)


def read_wheel(path: Path) -> Wheel:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    name, version = _name_and_version(path)
    return Wheel(path=path, name=name, version=version, sha256=digest.hexdigest(), unpacked_bytes=unpacked)
