"""How fast does a model come off its disk? File system, page cache, a bounded read of the real file.

Run as a program (`python -m llamarack.hardware.disk PATH`) it prints the record as JSON: a network file system can
block its reader for ever, so `check` asks a child.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from llamarack.units import MIB

# Names in /proc/self/mountinfo behind which another machine does the reading. 9p and virtiofs are shares of the host.
_NETWORK = re.compile(r"nfs4?|cifs|smb\w*|ceph|glusterfs|lustre|beegfs|gpfs|afs|9p|fuse\.(?!fuse-overlayfs).*")
_READ_LIMIT_BYTES = 256 * MIB
_READ_LIMIT_S = 3.0
_BLOCK_BYTES = 8 * MIB  # loaders and read-ahead ask for megabytes at a time
_CACHE_SAMPLES = 256
_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDisk:
    path: str
    size_bytes: int  # of the weight files
    file_system: str | None
    is_network: bool | None
    is_rotational: bool | None
    free_bytes: int | None
    cached_fraction: float | None  # of the largest weight file, by samples of its pages
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
        is_network=None if file_system is None else _NETWORK.fullmatch(file_system) is not None,
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


def cached_fraction(path: Path, samples: int = _CACHE_SAMPLES) -> float | None:
    """Share of sampled pages that are read without waiting; None where the file system cannot tell.

    A miss makes the kernel fetch that page: so read-ahead is off, and each call takes other pages than the last.
    """
    size = path.stat().st_size
    if size == 0:
        return None
    pages = range(-(-size // mmap.PAGESIZE))
    offsets = [page * mmap.PAGESIZE for page in random.sample(pages, min(samples, len(pages)))]
    buffer = bytearray(1)
    hits = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in offsets:
            try:
                os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
                hits += 1
            except BlockingIOError:
                continue
            except OSError:
                return None
    finally:
        os.close(descriptor)
    return hits / len(offsets)


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
