"""Are all bytes of the model there, and are they the published ones? Findings; reads whole files only for checksums.

Sizes were held against the headers when the model was read (`read_model` refuses a cut-off file); what is left is a
file with holes, and content that differs from a SHA256SUMS file beside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from llamarack.errors import ModelError
from llamarack.hardware.finding import Finding, Severity
from llamarack.model.spec import ModelSpec
from llamarack.units import format_bytes

SUMS_NAME = "SHA256SUMS"
_MAX_SUMS_BYTES = 1024**2
# `sha256sum` writes two blanks, or a blank and `*` for binary mode.
_LINE = re.compile(r"(?P<sha256>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_CHUNK_BYTES = 4 * 1024**2
_AGAIN = "copy or download the file again"


def check_completeness(
    spec: ModelSpec, *, checksums: bool = True, progress: Callable[[int], None] | None = None
) -> tuple[Finding, ...]:
    """`checksums`: also compare with SHA256SUMS where there is one, which reads every byte.

    `progress` is told the bytes just read. Raises ModelError where a file cannot be read.
    """
    try:
        findings = [finding for file in spec.files for finding in _holes(file)]
        sums_file = spec.files[0].parent / SUMS_NAME
        if checksums and sums_file.is_file():
            findings += _compare(spec, read_sums(sums_file), sums_file, progress)
    except OSError as error:
        raise ModelError(
            f"`{error.filename}` cannot be read: {error.strerror or error}",
            hint=f"see who may read it: `ls -lL {spec.files[0].parent}`",
        ) from error
    return tuple(findings)


def read_sums(path: Path) -> dict[str, str]:
    """File name to lower-case SHA-256, in the format of `sha256sum`. Raises ModelError for any other line."""
    if path.stat().st_size > _MAX_SUMS_BYTES:
        raise ModelError(
            f"`{path}` has over {_MAX_SUMS_BYTES:,} bytes", hint="write it anew: `sha256sum * > SHA256SUMS`"
        )
    sums = {}
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise ModelError(
                f"`{path}` line {number} is not `SHA256  NAME`: `{line[:60]}`",
                hint="write it anew: `sha256sum * > SHA256SUMS`",
            )
        sums[match["name"].removeprefix("./")] = match["sha256"].lower()
    return sums


def _holes(file: Path) -> list[Finding]:
    """Space that was never written reads as zeros; a resumed or preallocated download leaves it (`du` against `ls`)."""
    status = file.stat()
    stored_bytes = 512 * status.st_blocks  # POSIX counts st_blocks in 512 bytes, whatever the file system's block is
    # Compressing file systems also store less than the size; weights do not compress by half.
    if stored_bytes * 2 >= status.st_size:
        return []
    return [
        Finding(
            code="file_has_holes",
            severity=Severity.WARNING,
            subject=str(file),
            seen=f"{format_bytes(stored_bytes)} on disk of {format_bytes(status.st_size)}",
            why="parts that were never written read as zeros, and the model answers garbage",
            fix=f"{_AGAIN}, or compare its sha256 with the source: `sha256sum {file}`",
        )
    ]


def _compare(
    spec: ModelSpec, sums: dict[str, str], sums_file: Path, progress: Callable[[int], None] | None
) -> list[Finding]:
    findings = []
    for file in spec.files:
        expected = sums.get(file.name)
        if expected is None:
            findings.append(
                _finding("checksum_missing", Severity.NOTE, file, f"no line in `{sums_file}`", "nothing to do")
            )
            continue
        actual = _sha256(file, progress)
        if actual != expected:
            seen = f"sha256 {actual[:16]}, {SUMS_NAME} says {expected[:16]}"
            findings.append(_finding("checksum_wrong", Severity.ERROR, file, seen, _AGAIN))
    return findings


def _finding(code: str, severity: Severity, file: Path, seen: str, fix: str) -> Finding:
    why = "the content is not what was published" if severity == Severity.ERROR else "its content was not compared"
    return Finding(code=code, severity=severity, subject=str(file), seen=seen, why=why, fix=fix)


def _sha256(path: Path, progress: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if progress:
                progress(len(chunk))
    return digest.hexdigest()
