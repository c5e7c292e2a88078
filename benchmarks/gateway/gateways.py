"""The gateways that are compared, each started as its own documentation says, on one core, with its logs off.

A peer's environment is a virtual environment of its own: `--peers FOLDER` holds `vllm-router`, `sglang-router` and
`litellm`, made by `python -m venv` and `pip install` of the versions below; nginx is Debian's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "litellm": "1.106.12"}
_START_TIMEOUT_S = 120.0
_LITELLM = """
model_list:
  - model_name: fake
    litellm_params: {model: openai/fake, api_base: "http://127.0.0.1:%d/v1", api_key: none}
litellm_settings: {drop_params: true, request_timeout: 600}
general_settings: {master_key: "%s"}
"""
_NGINX = """
worker_processes 1; daemon off; pid %(folder)s/nginx.pid; error_log %(folder)s/error.log crit;
events { worker_connections 2048; }
http {
  access_log off; keepalive_requests 1000000; client_max_body_size 32m;
  client_body_temp_path %(folder)s/body; proxy_temp_path %(folder)s/proxy; fastcgi_temp_path %(folder)s/f;
  uwsgi_temp_path %(folder)s/u; scgi_temp_path %(folder)s/s;
  upstream engine { server 127.0.0.1:%(engine)d; keepalive 256; keepalive_requests 1000000; }
  server {
    listen 127.0.0.1:%(port)d;
    location / {
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }
  }
}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def commands(
    peers: Path, nginx: str | None, folder: Path, engine_port: int
) -> dict[str, tuple[list[str], int, str | None]]:
    """By name, the command, its port, and its key where it must have one; what is not installed is left out."""
    found: dict[str, tuple[list[str], int, str | None]] = {}
    if nginx is not None:
        port = free_port()
        home = folder / "nginx"
        home.mkdir()
        config = home / "nginx.conf"
        config.write_text(_NGINX % {"folder": home, "engine": engine_port, "port": port})
        found["nginx"] = ([nginx, "-p", str(home), "-c", str(config)], port, None)
    url = f"http://127.0.0.1:{engine_port}"
    for name in ("vllm-router", "sglang-router"):
        program = peers / name / "bin" / name
        if program.exists():
            port = free_port()
            words = ["--worker-urls", url, "--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
            words += ["--prometheus-port", str(free_port()), "--log-level", "error"]
            launch = ["launch"] if name == "sglang-router" else []
            found[name] = ([str(program), *launch, *words], port, None)
    if (peers / "litellm" / "bin" / "litellm").exists():
        port = free_port()
        config = folder / "litellm.yaml"
        key = f"sk-{secrets.token_hex(32)}"  # it refuses to start without one
        config.write_text(_LITELLM % (engine_port, key))
        words = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        found["litellm"] = ([str(peers / "litellm" / "bin" / "litellm"), *words], port, key)
    return found


@contextlib.contextmanager
def running(argv: list[str], port: int, key: str | None, core: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Until it answers; ended with all that it started."""
    environment = {**os.environ, "LITELLM_LOG": "ERROR", "RUST_LOG": "error", "NO_PROXY": "*", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *argv], stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not answers(port, key):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(port: int, key: str | None) -> bool:
    body = b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":2}'
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or 'none'}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Proportional set size of the process and all it started."""
    import psutil

    total = 0
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            total += each.memory_full_info().pss
    return total


def find_nginx(given: str | None) -> str | None:
    return given or shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
