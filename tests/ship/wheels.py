"""Small wheels written by hand, and a bundle made of them."""

import csv
import io
import json
import platform
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from llamarack.ship.bundle import write_fixed_files, write_sums
from llamarack.ship.own_wheel import repacked
from llamarack.ship.wheelhouse import lock_text, read_wheel

_STARTS = "import sys\nprint('llamarack {version}')\nsys.exit({code})\n"


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    if scripts:
        lines = "".join(f"{script} = {place}\n" for script, place in scripts.items())
        everything[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}"
    record = io.StringIO()
    csv.writer(record, lineterminator="\n").writerows((path, "", "") for path in [*everything, f"{info}/RECORD"])
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**everything, f"{info}/RECORD": record.getvalue()}.items():
            archive.writestr(member, text)
    return path


def write_bundle(
    folder: Path, version: str, *, exit_code: int = 0, models: Mapping[str, bytes] | None = None, **changes: Any
) -> str:
    """A bundle whose llamarack only tells its version and ends with `exit_code`; returns its digest."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    main = "def main():\n    " + _STARTS.format(version=version, code=exit_code).replace("\n", "\n    ")
    package = {
        "llamarack/__init__.py": "",
        "llamarack/app.py": main,
        "llamarack/__main__.py": "from llamarack import app\napp.main()\n",
    }
    own = write_wheel(wheels, "llamarack", version, package, scripts={"llamarack": "llamarack.app:main"})
    pip = repacked(distribution("pip"), wheels)
    (folder / "llamarack.txt").write_text(lock_text([read_wheel(own), read_wheel(pip)]))
    for name, data in (models or {}).items():
        path = folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    record = {
        "schema_version": 1,
        "llamarack": version,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
        "glibc": "2.5",
        "app": {"lock": "llamarack.txt", "unpacked_bytes": 1},
        "engines": [],
        "models": sorted({name.split("/")[0] for name in models or {}}),
    }
    (folder / "bundle.json").write_text(json.dumps({**record, **changes}, indent=2))
    write_fixed_files(folder)
    return write_sums(folder)[0]
