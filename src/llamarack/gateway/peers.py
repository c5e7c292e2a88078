"""The workers of one gateway ask each other for their counters, so that any of them can answer /metrics for all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

_TIMEOUT_S = 2.0


class PeerSocket:
    """Answers every connection with `text()`; a worker that does not answer (it is being started again) is left out."""

    def __init__(self, folder: Path, worker: int, workers: int, text: Callable[[], str]) -> None:
        self._paths = [folder / f"gateway-{number}.peer" for number in range(workers)]
        self._worker = worker
        self._text = text
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        path = self._paths[self._worker]
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, str(path))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._paths[self._worker].unlink(missing_ok=True)

    async def texts(self) -> list[str]:
        """Of all others that answer."""
        others = [path for number, path in enumerate(self._paths) if number != self._worker]
        found = await asyncio.gather(*(_ask(path) for path in others))
        return [text for text in found if text]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(self._text().encode())
            await writer.drain()
        writer.close()


async def _ask(path: Path) -> str:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                return (await reader.read()).decode()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return ""
