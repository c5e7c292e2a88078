"""Tells a service manager how it goes: systemd's protocol (sd_notify(3)), datagrams to `$NOTIFY_SOCKET`.

Without that variable nothing is sent. The watchdog's sign of life comes from the supervisor's own loop, so it stops
when that loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping, Sequence

from llamarack.supervise.state import State


class Notifier:
    """`watchdog_s`: the manager ends us after so long without a sign of life; None: it does not watch."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        self.watchdog_s = watchdog_s
        self._address = None if address is None else "\0" + address[1:] if address.startswith("@") else address
        self._status = ""

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent when it changed."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    async def keep_alive(self) -> None:
        """Signs of life, at half the interval (sd_watchdog_enabled(3)), until cancelled."""
        while self.watchdog_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        # A manager that does not listen must not stop the service.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(), self._address)


def take_notifier(environment: MutableMapping[str, str]) -> Notifier:
    """What the manager asks of this process. The variables are taken out: they are not for engines."""
    address = environment.pop("NOTIFY_SOCKET", None)
    interval = environment.pop("WATCHDOG_USEC", "")
    owner = environment.pop("WATCHDOG_PID", "")
    is_for_us = owner in {"", str(os.getpid())}
    watchdog_s = int(interval) / 1e6 if address and is_for_us and interval.isdigit() and int(interval) > 0 else None
    return Notifier(address or None, watchdog_s)


def status_line(states: Sequence[tuple[str, State]], *, draining: bool, running: int) -> str:
    """`2 of 3 replicas ready; llama-2 loading`. Pure."""
    if draining:
        return f"draining: {running} requests running"
    ready = sum(state is State.READY for _, state in states)
    others = ", ".join(f"{name} {state.value}" for name, state in states if state is not State.READY)
    return f"{ready} of {len(states)} replicas ready" + (f"; {others}" if others else "")
