"""Ctrl-C, SIGTERM and a closed terminal end a measurement early, and what was measured is kept: one way for `bench`,
`tune` and `soak`."""

from __future__ import annotations

import asyncio
import signal

EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_HUNG_UP = 130, 143, 129


def cancel_on_signals(*, once: bool = False) -> list[int]:
    """From now on each of these cancels the task that calls this. Returns a list that gets an exit code with each.
    `once`: a later signal does not cancel what follows the first."""
    received: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def stop(exit_code: int) -> None:
        if received and once:
            return
        received.append(exit_code)
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop, EXIT_INTERRUPTED)
    loop.add_signal_handler(signal.SIGTERM, stop, EXIT_TERMINATED)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which is what nohup asks for
        loop.add_signal_handler(signal.SIGHUP, stop, EXIT_HUNG_UP)
    return received
