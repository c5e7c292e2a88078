"""API keys: random, kept as SHA-256 in a file of the user's own, compared in constant time, re-read when it changes."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llamarack.errors import ConfigError, Unauthorized
from llamarack.yaml_text import parse_yaml, read_text

_PREFIX = "lr-"
_RECHECK_S = 1.0


class Key(BaseModel):
    """One caller. The key itself is shown once, when it is made. `models`: the only ones it may use; the limits: None
    is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created_unix_s: int
    models: list[str] | None = None
    max_parallel: Annotated[int, Field(ge=1)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_day: Annotated[int, Field(ge=1)] | None = None


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    keys: list[Key] = []


def read_keys(path: Path) -> KeyFile:
    """Raises ConfigError for a file that is missing, readable by others, or not a keys file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"keys file `{path}` cannot be read: {error.strerror}", hint=f"llamarack keys add NAME --file {path}"
        ) from error
    value = parse_yaml(read_text(path, "keys file"), str(path)).value
    if mode & 0o007:
        raise ConfigError(f"keys file `{path}` is open to every user", hint=f"chmod 600 {path}")
    try:
        return KeyFile.model_validate(value or {})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"keys file `{path}`: `{place}`: {first['msg']}", hint="llamarack keys add makes it"
        ) from None


def write_keys(path: Path, content: KeyFile) -> None:
    fresh = path.with_name(path.name + ".new")
    try:
        with open(fresh, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            yaml.safe_dump(content.model_dump(exclude_none=True), file, sort_keys=False)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)  # a full disk leaves half of it


def new_key() -> tuple[str, str]:
    """(key to hand out, its SHA-256)."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """The guard of every path but health. A file that becomes unreadable keeps the keys read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = read_keys(path)
        self._stamp = self._file_stamp()
        self._checked_monotonic_s = time.monotonic()

    def require(self, headers: Mapping[str, str]) -> Key:
        """The caller's entry. Raises Unauthorized. Reads `authorization: Bearer` and `api-key`."""
        self.refresh()
        given = headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        key = (token.strip() if scheme.lower() == "bearer" else "") or headers.get("api-key", "")
        if not key:
            raise Unauthorized("no API key was given", hint="send `Authorization: Bearer KEY`")
        digest = hashlib.sha256(key.encode(errors="replace")).hexdigest()
        found = None
        for known in self._content.keys:  # all of them, so that time tells nothing
            if hmac.compare_digest(known.sha256, digest):
                found = known
        if found is None:
            raise Unauthorized("this API key is not known here", hint="llamarack keys list shows which are")
        return found

    def refresh(self) -> KeyFile:
        """The keys that hold now: what `require` found holds as long as this is the same object."""
        now = time.monotonic()
        if now - self._checked_monotonic_s < _RECHECK_S:
            return self._content
        self._checked_monotonic_s = now
        stamp = self._file_stamp()
        if stamp is not None and stamp != self._stamp:
            try:
                self._content = read_keys(self._path)
                self._stamp = stamp
            except ConfigError:
                pass
        return self._content

    def _file_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
