"""A real rack for tiers that need one: the demo model behind a real gateway, in processes of its own."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from llamarack.supervise.gateways import listen

READY_TIMEOUT_S = 300.0


def _free_port() -> int:
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def demo_rack(folder: Path, *, sequences: int, context_tokens: int = 1024) -> Iterator[str]:
    """Its base URL, without /v1, once it is ready; everything is ended afterwards."""
    model = demo_model(cache_dir(), print)
    port = _free_port()
    file = folder / "demo.yaml"
    # One thread: two spin against whatever else runs on a small machine.
    limits = f"{{context_tokens: {context_tokens}, sequences: {sequences}, threads: 1}}"
    file.write_text(
        f"models:\n  - name: smollm2-135m\n    path: {model}\n    limits: {limits}\n"
        f"gateway: {{port: {port}, max_queue_s: 300}}\n"
    )
    environment = {
        **os.environ,
        "LLAMARACK_STATE_DIR": str(folder / "state"),
        "LLAMARACK_LOAD_LOCK": str(folder / "load.lock"),
    }
    with open(folder / "serve.log", "wb") as log:
        serving = subprocess.Popen(
            [sys.executable, "-m", "llamarack", "serve", str(file)], env=environment, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _until_ready(url, serving, folder / "serve.log")
        yield url
    finally:
        serving.terminate()
        try:
            serving.wait(60)
        except subprocess.TimeoutExpired:
            serving.kill()
            serving.wait()


def _until_ready(url: str, serving: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and serving.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"the demo rack is not ready: {log.read_text()}")
