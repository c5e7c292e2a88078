"""Why a change goes back."""

from __future__ import annotations


class Failure(Exception):
    """`exit_code`: of the command that asked for the change."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 5) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def asked_back() -> Failure:
    return Failure("somebody asked for it", exit_code=130)
