"""Connections to engines, on their Unix sockets. The seam behind which the transport may change.

Connections are not reused: opening one costs some 50 us on a Unix socket, and a connection that the engine closed for
being idle would look like an engine that died.
"""

from __future__ import annotations

import aiohttp

from llamarack.engine.adaptor import Endpoint
from llamarack.supervise.table import Table

# A reply head may take as long as a prefill; the request's own deadline ends it.
_CONNECT_TIMEOUT_S = 5.0
_READ_BUFFER_BYTES = 256 * 1024


class EngineBroke(Exception):
    """The connection failed or ended early: the engine died, was killed, or lost the request."""


class EnginePool:
    """Sessions by endpoint key; `keep_only` closes those whose engine is gone."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def session(self, endpoint: Endpoint) -> aiohttp.ClientSession:
        session = self._sessions.get(endpoint.key)
        if session is None:
            connector = (
                aiohttp.UnixConnector(path=str(endpoint.socket), limit=0, force_close=True)
                if endpoint.socket
                else aiohttp.TCPConnector(limit=0, force_close=True)
            )
            session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                trust_env=False,
                read_bufsize=_READ_BUFFER_BYTES,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
            self._sessions[endpoint.key] = session
        return session

    async def post(self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """The reply once its head is there; the caller closes it. Raises EngineBroke."""
        try:
            return await self.session(endpoint).post(
                f"{endpoint.base_url}{path}",
                data=body,
                headers={**headers, "Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"},
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineBroke(str(error)) from error

    async def get_text(self, endpoint: Endpoint, path: str, timeout_s: float) -> str | None:
        """The text of a 200 reply, None for anything else."""
        try:
            async with self.session(endpoint).get(
                f"{endpoint.base_url}{path}",
                headers={"Authorization": f"Bearer {endpoint.key}"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def keep_only(self, table: Table) -> None:
        known = {row.endpoint.key for row in table.replicas if row.endpoint is not None}
        for key in [key for key in self._sessions if key not in known]:
            await self._sessions.pop(key).close()

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
