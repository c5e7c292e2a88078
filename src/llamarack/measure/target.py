"""Where the requests go: an OpenAI-compatible base URL over TCP, TLS or a Unix socket."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import unquote, urlsplit

from llamarack.errors import UsageError

_SUFFIXES = ("/v1/chat/completions", "/v1/completions", "/v1")
_EXAMPLES = "http://127.0.0.1:8080, https://host/v1 or unix:///run/rack/gateway.sock"


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`base_path`: before `/v1`, without a closing slash. `unix_path`: when set, `host` and `port` are not used."""

    url: str
    host: str
    port: int
    base_path: str = ""
    is_tls: bool = False
    ca_file: Path | None = None
    unix_path: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The machine's own trusted authorities, or `ca_file` alone."""
        return ssl.create_default_context(cafile=self.ca_file) if self.is_tls else None

    @property
    def host_header(self) -> str:
        if self.unix_path is not None:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def parse_target(url: str, *, api_key: str | None = None, ca_file: Path | None = None) -> Target:
    """`/v1` and the full endpoint path are accepted and dropped. Raises UsageError."""
    if url.startswith(("unix://", "http+unix://")):
        return Target(url=url, host="localhost", port=0, unix_path=_unix_path(url), api_key=api_key)
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise UsageError(f"target `{url}` is not an http, https or unix URL", hint=f"such as {_EXAMPLES}")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(f"target `{parts.hostname}`: user names, `?` and `#` are not used", hint="pass --api-key-file")
    is_tls = parts.scheme == "https"
    base_path = parts.path.rstrip("/")
    for suffix in _SUFFIXES:
        base_path = base_path.removesuffix(suffix)
    return Target(
        url=url,
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        base_path=base_path,
        is_tls=is_tls,
        ca_file=ca_file,
        api_key=api_key,
    )


def _unix_path(url: str) -> str:
    path = unquote(url.partition("://")[2]).rstrip("/")
    for suffix in _SUFFIXES:
        path = path.removesuffix(suffix)
    if not path.startswith("/"):
        raise UsageError(f"target `{url}`: the socket path must be absolute", hint="unix:///run/rack/gateway.sock")
    return path
