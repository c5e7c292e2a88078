"""The installer's command line, and what becomes of a refusal."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from llamarack.ship.installer.commands import accept, install, undo, uninstall
from llamarack.ship.installer.contents import SUMS, Bundle
from llamarack.ship.installer.prefix import Prefix
from llamarack.ship.installer.refusal import Refusal, tell


def _default_prefix() -> Path:
    return Path("/opt/llamarack") if os.getuid() == 0 else Path.home() / ".local" / "lib" / "llamarack"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="install.sh",
        description="Install llamarack without a network, into one folder, as any user.",
        epilog="Afterwards PREFIX/bin/llamarack-install knows accept, undo and uninstall without the bundle. "
        "PYTHON=/path/to/python chooses the interpreter.",
    )
    words = {
        "install": "verify, install beside the version in use, switch to it (the default)",
        "verify": "compare every file of the bundle with its hash",
        "accept": "remove the version before",
        "undo": "go back to it",
        "uninstall": "remove all versions",
    }
    told = "; ".join(f"{word}: {meaning}" for word, meaning in words.items())
    parser.add_argument("command", nargs="?", default="install", choices=list(words), metavar="COMMAND", help=told)
    parser.add_argument(
        "--prefix", type=Path, default=_default_prefix(), help="the one folder that is written (default: %(default)s)"
    )
    parser.add_argument("--expect", metavar="SHA256", help=f"what `llamarack bundle` printed for {SUMS}")
    return parser.parse_args(arguments)


def main() -> None:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    os.umask(0o022)  # others may run what one user installed
    prefix = Prefix(options.prefix.expanduser().absolute())
    try:
        match options.command:
            case "accept":
                accept(prefix)
            case "undo":
                undo(prefix)
            case "uninstall":
                uninstall(prefix)
            case command:
                bundle = Bundle(Path(sys.argv[0]).absolute().parent)
                if command == "install":
                    install(bundle, prefix, options.expect)
                else:
                    bundle.verify(models=True)
                    tell(f"{len(bundle.sums)} files are as they were made; SHA-256 of {SUMS}: {bundle.digest}")
    except Refusal as refusal:
        tell(f"error: {refusal}\nhint: {refusal.hint}")
        sys.exit(refusal.exit_code)
    except KeyboardInterrupt:
        tell("interrupted; the version in use is as it was")
        sys.exit(130)
    except OSError as error:
        # A full disk is met in the middle of a file, whose name is then not told.
        tell(f"error: `{error.filename or prefix.folder}`: {error.strerror}\nhint: check space and permissions there")
        sys.exit(3)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
