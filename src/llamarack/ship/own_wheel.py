"""Our own wheel, made from what runs here: from the source tree by its build backend, or from the installed files.

The second way needs neither network nor build tools, and gives what was installed, byte for byte.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import shutil
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.utils import canonicalize_name

import llamarack
from llamarack.errors import UsageError
from llamarack.ship.pip import run_pip

_NAME = "llamarack"
_SOURCE_FILES = ("pyproject.toml", "README.md", "LICENSE")
# What installers add beside what the wheel held (PyPA, recording installed projects).
_NOT_IN_WHEEL = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time a zip file can name: the same files give the same wheel


def own_wheel(folder: Path, scratch: Path) -> Path:
    """Writes the wheel into `folder`. Raises UsageError where llamarack was neither installed nor lies in its tree."""
    root = source_tree()
    if root is not None:
        return _built(root, folder, scratch)
    try:
        installed = distribution(_NAME)
    except PackageNotFoundError:
        raise UsageError("llamarack is not installed as a package here", hint="pip install llamarack") from None
    return repacked(installed, folder)


def source_tree() -> Path | None:
    """The checkout that the running code lies in (an editable install), or None."""
    root = Path(llamarack.__file__).parents[2]
    is_ours = (root / "pyproject.toml").is_file() and (root / "src" / _NAME / "__init__.py").is_file()
    return root if is_ours else None


def _built(root: Path, folder: Path, scratch: Path) -> Path:
    copy = scratch / "source"  # a build leaves files behind, and old ones of those would come along
    copy.mkdir(parents=True)
    for name in _SOURCE_FILES:
        shutil.copy2(root / name, copy / name)
    shutil.copytree(root / "src" / _NAME, copy / "src" / _NAME, ignore=shutil.ignore_patterns("__pycache__"))
    run_pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(copy)], what="build of llamarack's wheel")
    (wheel,) = folder.glob(f"{_NAME}-*.whl")
    return wheel


def repacked(installed: Distribution, folder: Path) -> Path:
    """The pure wheel that `installed` came from, from its files. Raises UsageError where one of them is gone."""
    stem = f"{canonicalize_name(installed.name).replace('-', '_')}-{installed.version}"
    info = f"{stem}.dist-info"
    rows: list[tuple[str, str, int]] = []
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(installed.files or [], key=str):
            is_added = file.parts[0] == info and file.name in _NOT_IN_WHEEL
            if file.parts[0] in {"..", "/"} or file.suffix == ".pyc" or is_added:
                continue
            try:
                data = Path(str(file.locate())).read_bytes()
            except OSError as error:
                raise UsageError(
                    f"the installed file `{file}` cannot be read: {error.strerror}",
                    hint="pip install --force-reinstall --no-deps llamarack",
                ) from error
            _add(archive, str(file), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((str(file), f"sha256={digest}", len(data)))
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
        _add(archive, f"{info}/RECORD", record.getvalue().encode())
    return path


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)
