"""`python -m llamarack` and the console script."""

import os
import sys

from llamarack.supervise import standby

__all__ = ["main"]


def main() -> None:
    # pydantic looks through every installed distribution for plug-ins, here and in the gateway: no command uses one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    standby.begin(sys.argv[1:])  # before the imports of a command, beside which it comes up
    try:
        from llamarack.cli import main as run

        run()
    finally:
        standby.end()  # a command that ends leaves nothing, also not for a moment


if __name__ == "__main__":
    main()
