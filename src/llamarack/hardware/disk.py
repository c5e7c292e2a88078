"""How fast does a model come off its disk? File system, page cache, a bounded read of the real file.

Run as a program (`python -m llamarack.hardware.disk PATH`) it prints the record as JSON: a network file system can
block its reader for ever, so `check` asks a child.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamarack.units import MIB

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    _Bytes = numpy.typing.NDArray[numpy.uint8]

# Names in /proc/self/mountinfo behind which another machine does the reading. 9p and virtiofs are shares of the host.
_NETWORK = re.compile(r"nfs4?|cifs|smb\w*|ceph|glusterfs|lustre|beegfs|gpfs|afs|9p|fuse\.(?!fuse-overlayfs).*")
_READ_LIMIT_BYTES = 256 * MIB
_READ_LIMIT_S = 3.0
_BLOCK_BYTES = 8 * MIB  # loaders and read-ahead ask for megabytes at a time
_WINDOW_BYTES = 1 * MIB  # of a file, asked for in one call
_WINDOWS = 1024  # at most twice as many: mincore walks 140 GiB in seconds, these in milliseconds
_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDisk:
    """The disk that a model lies on."""

    path: str
    size_bytes: int  # of the weight files
    file_system: str | None
    is_network: bool | None
    is_rotational: bool | None
    free_bytes: int | None
    cached_fraction: float | None  # of the largest weight file
    read_bytes_per_s: float | None
    read_direct: bool  # past the page cache; False: the speed may be that of memory

    @property
    def predicted_read_s(self) -> float | None:
        """Reading alone, for what the page cache does not hold; None where the speed is not known."""
        if self.read_bytes_per_s is None:
            return None
        return self.size_bytes * (1 - (self.cached_fraction or 0.0)) / self.read_bytes_per_s


def read_model_disk(path: Path, root: Path = Path("/")) -> ModelDisk:
    """`path`: a weight file, or a folder of them. Reads at most 256 MiB or 3 s. Raises OSError."""
    path = path.resolve()
    files = weight_files(path)
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    file_system = file_system_of(path, root)
    speed, direct = measure_read(largest) if largest else (None, False)
    return ModelDisk(
        path=str(path),
        size_bytes=sum(file.stat().st_size for file in files),
        file_system=file_system,
        is_network=is_network(file_system),
        is_rotational=_is_rotational(path, root),
        free_bytes=shutil.disk_usage(path).free,
        cached_fraction=cached_fraction(largest) if largest else None,
        read_bytes_per_s=speed,
        read_direct=direct,
    )


def weight_files(path: Path) -> list[Path]:
    """A GGUF split in parts counts whole; Hugging Face caches keep links to files elsewhere."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())
    part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if part:
        return sorted(path.parent.glob(f"{part[1]}-?????-of-{part[2]}.gguf"))
    return [path]


def file_system_of(path: Path, root: Path = Path("/")) -> str | None:
    """Type of the mount that holds `path`: the deepest mount point above it, the latest of several on one point."""
    best: tuple[int, str] | None = None
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        # Spaces in mount points are written as \040.
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), after.split(" ")[0])
    return best[1] if best else None


def is_network(file_system: str | None) -> bool | None:
    return None if file_system is None else _NETWORK.fullmatch(file_system) is not None


def cached_fraction(path: Path) -> float | None:
    """Share of the file's pages in the page cache, by mincore(2), which fetches none of them; large files by samples.

    None where the kernel does not tell: it calls every page resident to a user who neither owns the file nor may
    write to it. (A read with RWF_NOWAIT asks anybody's files, but starts a fetch and on a fast disk finds its result:
    one try in twelve called a file warm of which nothing was resident.)
    """
    import numpy  # here as below: it takes 0.1 s of every start, and a rack seldom asks

    status = path.stat()
    if status.st_size == 0 or not (status.st_uid == os.geteuid() or os.access(path, os.W_OK)):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        # numpy gives the address of read-only memory, which ctypes refuses to; a writable mapping of a large model
        # would be counted as memory and fail.
        content = numpy.frombuffer(mapping, numpy.uint8)
        found = [_resident(library, content[start : start + _WINDOW_BYTES]) for start in _windows(status.st_size)]
        del content  # the mapping cannot be closed while something points into it
    counted = [pages for pages in found if pages is not None]
    return float(numpy.concatenate(counted).mean()) if len(counted) == len(found) else None


def _windows(size_bytes: int) -> range:
    """Starts of windows that cover a small file and sample a large one evenly."""
    count = -(-size_bytes // _WINDOW_BYTES)
    return range(0, size_bytes, _WINDOW_BYTES * max(1, count // _WINDOWS))


def _resident(library: ctypes.CDLL, content: _Bytes) -> _Bytes | None:
    """One 0 or 1 per page of `content`, which starts on a page."""
    import numpy

    pages = numpy.zeros(-(-content.size // mmap.PAGESIZE), numpy.uint8)
    vector = pages.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte))
    failed = library.mincore(ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.size), vector)
    return None if failed else numpy.bitwise_and(pages, numpy.uint8(1))


def measure_read(path: Path, limit_bytes: int = _READ_LIMIT_BYTES) -> tuple[float | None, bool]:
    """Bytes per second from the middle of the file on, and whether the page cache was passed by."""
    try:
        descriptor, direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError:  # tmpfs and some network file systems have no direct reads
        descriptor, direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
    # Anonymous memory is page-aligned, as direct reads ask.
    with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
        try:
            return _timed_read(descriptor, buffer, path.stat().st_size, limit_bytes), direct
        except OSError:
            return None, direct
        finally:
            os.close(descriptor)


def _timed_read(descriptor: int, buffer: mmap.mmap, size: int, limit_bytes: int) -> float | None:
    offset = max(0, (size - limit_bytes) // 2) // mmap.PAGESIZE * mmap.PAGESIZE
    done = 0
    started_s = time.perf_counter()
    while done < limit_bytes and time.perf_counter() - started_s < _READ_LIMIT_S:
        count = os.preadv(descriptor, [buffer], offset + done)
        done += count
        if count < _BLOCK_BYTES:
            break
    elapsed_s = time.perf_counter() - started_s
    return done / elapsed_s if done and elapsed_s > 0 else None


def _is_rotational(path: Path, root: Path) -> bool | None:
    device = path.stat().st_dev
    folder = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for place in (folder / "queue/rotational", folder.resolve().parent / "queue/rotational"):  # a disk, a partition
        if place.exists():
            return place.read_text().strip() == "1"
    return None


if __name__ == "__main__":
    json.dump(dataclasses.asdict(read_model_disk(Path(sys.argv[1]))), sys.stdout)
