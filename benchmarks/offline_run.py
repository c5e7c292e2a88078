"""From an offline bundle to the first token, where there is no network: install, demo, serve, ask, bench; timed.

python -m benchmarks.offline_run [--bundle DIR] [-o RESULT.json] [--quick]

Everything after the bundle runs in a network namespace, as a user without rights, from an install folder that is made
read-only. First with loopback alone: there is no route. Then once more with a route that leads into a trap, a device
whose every packet this program reads: what would have phoned out where it can is seen here. The trap is first shown
to catch a packet. Needs Linux with user namespaces, or root; `ip` (iproute2), `setpriv` and `unshare` (util-linux).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

_RESULT = Path(__file__).with_name("results") / "offline.json"
_SERVICE_UID = 65534  # nobody
_TIMEOUT_S = 600.0
_ANSWER = re.compile(r"first token ([\d.]+) (ms|s)")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="default: one is made, with the demo model")
    parser.add_argument("--quick", action="store_true", help="a shorter bench")
    parser.add_argument("-o", "--output", type=Path, default=_RESULT)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        print(json.dumps(inside(options.bundle, options.inside, is_quick=options.quick)))
        return
    record = offline_run(options.bundle, is_quick=options.quick)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def offline_run(bundle: Path | None, *, is_quick: bool) -> dict[str, Any]:
    """Raises SystemExit naming the step that failed."""
    with tempfile.TemporaryDirectory(prefix="llamarack-offline-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        made_s = None
        if bundle is None:
            bundle = folder / "bundle"
            started = time.monotonic()
            _run([sys.executable, "-m", "llamarack", "bundle", "-o", str(bundle), "--demo-model"], dict(os.environ))
            made_s = time.monotonic() - started
        namespaces = ["--net", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
        command = ["unshare", *namespaces, sys.executable, "-m", "benchmarks.offline_run"]
        command += ["--bundle", str(bundle.absolute()), "--inside", str(folder), *(["--quick"] if is_quick else [])]
        steps = json.loads(_run(command, dict(os.environ)).stdout)
        size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    return {"machine": describe_machine(), "bundle_bytes": size, "bundle_made_s": made_s, **steps}


def inside(bundle: Path, folder: Path, *, is_quick: bool) -> dict[str, Any]:
    """In the namespace. Its steps in order, each with the seconds it took."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _require_no_route()
    service = Service(folder)
    prefix = folder / "service" / "install"
    steps: dict[str, Any] = {}

    started = time.monotonic()
    service.run("sh", str(bundle / "install.sh"), "--prefix", str(prefix))
    steps["install_s"] = time.monotonic() - started
    subprocess.run(["chmod", "-R", "a-w", str(prefix)], check=True)
    files_before = _files(prefix)
    command = str(prefix / "bin" / "llamarack")
    model = next((prefix / "models").glob("*.gguf"))

    demo_started = time.monotonic()
    demo = service.run(command, "demo", "--once", "--model", str(model))
    steps["demo_s"] = time.monotonic() - demo_started
    steps["demo_first_token_s"] = _first_token_s(demo.stderr)
    steps["bundle_to_first_answer_s"] = time.monotonic() - started
    steps["answer"] = demo.stdout.strip()
    steps |= _serve_and_bench(service, command, model, folder / "service" / "bench", is_quick=is_quick)

    with Trap() as trap:
        steps["trap_catches"] = trap.catches()
        service.run(command, "demo", "--once")
        _serve_and_bench(service, command, model, folder / "service" / "bench-trapped", is_quick=True)
        service.run(command, "check", "--no-functional", allowed=(0, 3))
        time.sleep(1.0)
        steps["packets_sent_out"] = trap.seen
    steps["install_folder_unchanged"] = _files(prefix) == files_before
    steps["user"] = service.shown
    for name, bad in (("packets_sent_out", steps["packets_sent_out"]), ("trap", not steps["trap_catches"])):
        if bad:
            sys.exit(f"offline run: {name}: {bad}")
    if not steps["install_folder_unchanged"]:
        sys.exit("offline run: something was written into the install folder")
    return steps


class Service:
    """Commands as a user without rights, with an environment that holds nothing of ours."""

    def __init__(self, folder: Path) -> None:
        home = folder / "service"
        home.mkdir()
        # In a user namespace only this user exists; it has no rights outside, whatever its number says.
        self._is_root = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        self._as_user: list[str] = []
        if self._is_root:
            os.chown(home, _SERVICE_UID, _SERVICE_UID)
            ids = [f"--reuid={_SERVICE_UID}", f"--regid={_SERVICE_UID}", "--clear-groups"]
            self._as_user = ["setpriv", *ids, "--no-new-privs", "--bounding-set=-all"]
        self.shown = f"uid {_SERVICE_UID}" if self._is_root else f"uid {os.getuid()} of a user namespace"
        self.environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "LLAMARACK_STATE_DIR": str(home / "state"),
            "LLAMARACK_LOG_DIR": str(home / "logs"),
            "LLAMARACK_CACHE_DIR": str(home / "cache"),
            "LLAMARACK_LOAD_LOCK": str(home / "load.lock"),
            **({"PYTHON": os.environ["PYTHON"]} if "PYTHON" in os.environ else {}),
        }

    def run(self, *words: str, allowed: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        return _run([*self._as_user, *words], self.environment, allowed=allowed)


class Trap:
    """A device with the default route; every IP packet that is sent out anywhere ends here and is noted."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self._fd, _TUNSETIFF, struct.pack("16sH22x", b"trap", _IFF_TUN | _IFF_NO_PI))
        for words in ("addr add 198.51.100.1/24 dev trap", "link set trap up", "route add default dev trap"):
            subprocess.run(["ip", *words.split()], check=True)
        servers = Path("/etc/resolv.conf")
        with tempfile.NamedTemporaryFile("w", suffix=".conf", delete=False) as file:
            file.write("nameserver 198.51.100.53\n")
        os.chmod(file.name, 0o644)
        if servers.exists():
            subprocess.run(["mount", "--bind", file.name, str(servers.resolve())], check=True)
        self._ending = threading.Event()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Trap:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._reader.join()
        os.close(self._fd)

    def catches(self) -> bool:
        """Whether a connection and a look-up that are tried on purpose are seen; they are then forgotten."""
        with socket.socket() as connection:
            connection.settimeout(0.5)
            try:
                connection.connect(("192.0.2.1", 443))
            except OSError:
                pass
        look_up = [sys.executable, "-c", "import socket; socket.gethostbyname('huggingface.co')"]
        subprocess.run(["timeout", "3", *look_up], capture_output=True, check=False)
        caught = {packet.split()[0] for packet in self.seen} == {"tcp", "udp"}
        self.seen = []
        return caught

    def _read(self) -> None:
        while not self._ending.is_set():
            if not select.select([self._fd], [], [], 0.1)[0]:
                continue
            packet = os.read(self._fd, 65536)
            if packet[0] >> 4 != 4:
                continue  # IPv6 has no route here; what comes are the kernel's own multicasts
            protocol = {6: "tcp", 17: "udp"}.get(packet[9], f"protocol-{packet[9]}")
            offset = (packet[0] & 15) * 4
            port = int.from_bytes(packet[offset + 2 : offset + 4])
            self.seen.append(f"{protocol} {socket.inet_ntoa(packet[16:20])}:{port}")


def _serve_and_bench(service: Service, command: str, model: Path, output: Path, *, is_quick: bool) -> dict[str, Any]:
    started = time.monotonic()
    service.run(command, "serve", str(model), "--port", "0", "--rack", "offline", "--detach")
    serve_s = time.monotonic() - started
    try:
        status = json.loads(service.run(command, "status", "--rack", "offline", "--json").stdout)
        url = f"http://127.0.0.1:{status['gateway']['port']}"
        load = ["--concurrency", "1", "--requests", "3"] if is_quick else ["--concurrency", "1,4", "--requests", "30"]
        started = time.monotonic()
        bench = [command, "bench", url, *load, "--input-tokens", "64", "--output-tokens", "32", "--json"]
        # 7: too few requests for a claim, which is no matter here
        result = json.loads(service.run(*bench, "-o", str(output), allowed=(0, 7)).stdout)
        bench_s = time.monotonic() - started
    finally:
        service.run(command, "stop", "--rack", "offline")
    failures = sum(point["failures"] for point in result["points"])
    if failures:
        sys.exit(f"offline run: {failures} requests of the bench failed")
    return {
        "serve_to_ready_s": serve_s,
        "bench_s": bench_s,
        "bench_requests": sum(point["requests"] for point in result["points"]),
    }


def _require_no_route() -> None:
    """No line but the heading in the routing table, and an address elsewhere is unreachable at once."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    with socket.socket() as connection:
        connection.settimeout(5)
        try:
            connection.connect(("192.0.2.1", 443))
        except OSError as error:
            reason = error.strerror
        else:
            reason = "connected"
    if routes or reason != "Network is unreachable":
        sys.exit(f"offline run: this namespace has a network: {routes} {reason}")


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


def _run(
    command: Sequence[str], environment: dict[str, str], *, allowed: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        sys.exit(f"offline run: `{command[0]}` is not there")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode not in allowed:
        sys.exit(f"offline run: {' '.join(command)} gave {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


if __name__ == "__main__":
    main()
