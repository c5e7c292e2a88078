"""What a bundle holds, and whether it is still what was made."""

import hashlib
import json
from pathlib import Path
from typing import Any

from llamarack.ship.installer.refusal import Refusal

SUMS = "SHA256SUMS"
SCHEMA_VERSION = 1
READ_BYTES = 4 * 1024**2


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


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
