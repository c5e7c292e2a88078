"""`python -m llamarack` and the console script."""

import gc
import os
import sys

from llamarack.supervise import standby
from llamarack.supervise.start_words import understood

__all__ = ["main"]

# Most of what a command makes are its modules: looking through them again and again finds nothing.
_GC_THRESHOLD = (20_000, 20, 20)


def main() -> None:
    gc.set_threshold(*_GC_THRESHOLD)
    _open_missing_streams()
    # pydantic looks through every installed distribution for plug-ins, here and in the gateway: no command uses one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    standby.begin(understood(sys.argv[1:]))  # before the imports of a command, beside which it comes up
    try:
        from llamarack.cli import main as run

        run()
    except KeyboardInterrupt:  # while that is imported
        sys.exit(130)
    finally:
        standby.end()  # a command that ends leaves nothing, also not for a moment
        gc.freeze()  # else the interpreter looks through all of it once more at its end, for 0.1 s


def _open_missing_streams() -> None:
    """A caller may close them (`>&-`): Python then has None there, and the next file or socket gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # in this order each open takes the lowest free number, its own
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process


if __name__ == "__main__":
    main()
