"""What an installer says and how it refuses: to people, on stderr."""

import sys


class Refusal(Exception):
    """`exit_code`: 2 the bundle or the command line, 3 the machine, 5 what was installed does not start."""

    def __init__(self, message: str, *, hint: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
