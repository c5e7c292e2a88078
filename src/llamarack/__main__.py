"""`python -m llamarack` and the console script."""

import sys

from llamarack.supervise import standby

__all__ = ["main"]


def main() -> None:
    standby.begin(sys.argv[1:])  # before the imports of a command, beside which it comes up
    from llamarack.cli import main as run

    run()


if __name__ == "__main__":
    main()
