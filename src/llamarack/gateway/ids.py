"""Request ids: those that callers bring, where they are fit for headers and logs, else random ones."""

from __future__ import annotations

import random
import re

# Ids are no secrets; asking the kernel for each costs more than the rest of it.
_RANDOM = random.Random()  # seeded by the kernel, in each worker anew
_GIVEN = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(given: str) -> str:
    return given if _GIVEN.fullmatch(given) else new_id()


def new_id() -> str:
    """32 hexadecimal digits."""
    return f"{_RANDOM.getrandbits(128):032x}"
