"""`python -m llamarack` and the console script."""

from llamarack.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
