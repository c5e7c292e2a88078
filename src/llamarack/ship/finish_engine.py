"""`python -m llamarack.ship.finish_engine FOLDER RECIPE`: starts a freshly installed engine, and marks it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llamarack.engine.install import Recipe, adopt
from llamarack.errors import LlamarackError


def main() -> None:
    values: dict[str, Any] = json.loads(sys.argv[2])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    recipe = Recipe(**fields)
    try:
        adopt(recipe, Path(sys.argv[1]))
    except LlamarackError as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")


if __name__ == "__main__":
    main()
