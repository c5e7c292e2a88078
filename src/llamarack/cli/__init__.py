"""The command line: one file per command, each parses, makes one call into the domain and prints.

stdout is data, stderr is for people. Every LlamarackError becomes a sentence, a hint and an exit code here.
"""

from __future__ import annotations

import sys

from llamarack.errors import LlamarackError

# Each command in the module of its name; only the one that was asked for is imported.
_COMMANDS = (
    "demo",
    "engine",
    "check",
    "plan",
    "serve",
    "node",
    "status",
    "drain",
    "reload",
    "stop",
    "keys",
    "bench",
    "tune",
    "soak",
    "verify",
    "compare",
    "acceptance",
    "export",
    "bundle",
    "support",
    "schema",
)


def main() -> None:
    """The console script. Exit codes: the table in `errors`; 130 and 143 for signals."""
    try:
        # Imported inside, since the imports of a command take a moment in which Ctrl-C can be typed.
        from llamarack.cli.plain_start import run_plainly

        code = run_plainly(sys.argv[1:])
        if code is None:
            from llamarack.cli.parser import run

            code = run()
    except LlamarackError as error:
        from llamarack.cli.console import print_error

        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's own end; `| head` has seen what it wanted
            sys.exit(0)
        raise
    except Exception as error:
        # The rare path pays for its imports.
        from llamarack.cli.console import print_error
        from llamarack.cli.last_resort import as_told

        told = as_told(error)
        print_error(told)
        sys.exit(told.exit_code)
    sys.exit(code)
