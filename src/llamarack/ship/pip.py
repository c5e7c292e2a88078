"""pip of this interpreter, under the user's own settings: index, proxy, certificates, constraints, wheel folders."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from llamarack.errors import HardwareError, UsageError

_TIMEOUT_S = 7200.0  # an engine with CUDA is gigabytes
_TOLD = ("Collecting", "Downloading", "Building wheel")


def run_pip(arguments: Sequence[str], *, what: str, tell: Callable[[str], None] | None = None) -> None:
    """Raises UsageError naming pip's own last complaint; `tell` gets a line a step."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off"]
    lines: deque[str] = deque(maxlen=40)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise HardwareError(f"`{sys.executable}` cannot be started: {error.strerror}") from error
    with process:
        watchdog = threading.Timer(_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            for line in map(str.strip, process.stdout):
                lines.append(line)
                if tell is not None and line.startswith(_TOLD):
                    tell(line if len(line) < 100 else line[:99] + "…")
            code = process.wait()
        finally:
            watchdog.cancel()
            process.terminate()  # of use when interrupted; otherwise it has ended
    if code:
        raise UsageError(f"{what} failed; pip said: {_complaint(lines)}", hint=_hint(lines))


def _complaint(lines: Sequence[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line]
    return errors[-1] if errors else "nothing"


def _hint(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    if "No module named pip" in text:
        return f"{sys.executable} -m ensurepip"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "PIP_CERT=/path/to/your-ca.pem names your own certificate authority"
    if "+cpu" in text and "No matching distribution" in text:
        return "PIP_EXTRA_INDEX_URL: PyTorch's index of builds for the processor, which the usual index does not have"
    return "pip's own settings hold here: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_CERT, HTTPS_PROXY, PIP_FIND_LINKS"
