"""A place without a network: a namespace of its own, a user without rights in it, and a trap for what is sent out."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TUN = "/dev/net/tun"
_SERVICE_UID = 65534  # nobody
_TIMEOUT_S = 900.0
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h


class Service:
    """Commands as a user without rights, with an environment that holds nothing of ours."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "service"
        self.home.mkdir(exist_ok=True)
        # In a user namespace only this user exists; it has no rights outside, whatever its number says.
        self._is_root = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        self._as_user: list[str] = []
        if self._is_root:
            os.chown(self.home, _SERVICE_UID, _SERVICE_UID)
            ids = [f"--reuid={_SERVICE_UID}", f"--regid={_SERVICE_UID}", "--clear-groups"]
            self._as_user = ["setpriv", *ids, "--no-new-privs", "--bounding-set=-all"]
        self.shown = f"uid {_SERVICE_UID}" if self._is_root else f"uid {os.getuid()} of a user namespace"
        self.environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "LLAMARACK_STATE_DIR": str(self.home / "state"),
            "LLAMARACK_LOG_DIR": str(self.home / "logs"),
            "LLAMARACK_CACHE_DIR": str(self.home / "cache"),
            "LLAMARACK_LOAD_LOCK": str(self.home / "load.lock"),
            **({"PYTHON": os.environ["PYTHON"]} if "PYTHON" in os.environ else {}),
        }

    def run(self, *words: str, allowed: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        return run([*self._as_user, *words], self.environment, allowed=allowed, cwd=Path("/"))


class Trap:
    """A device with the default route; every IP packet that is sent out anywhere ends here and is noted."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
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


def enter() -> None:
    """Called in a new network namespace: loopback, and nothing else. Raises SystemExit where there is a route."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
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


def run(
    command: Sequence[str], environment: Mapping[str, str], *, cwd: Path, allowed: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Raises SystemExit with the whole output where it ends otherwise than allowed."""
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
        cwd=cwd,
    )
    if done.returncode not in allowed:
        sys.exit(f"offline run: {' '.join(command)} gave {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
