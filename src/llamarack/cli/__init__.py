"""The command line: one file per command, each parses, makes one call into the domain and prints.

stdout is data, stderr is for people. Every LlamarackError becomes a sentence, a hint and an exit code here.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from llamarack.cli.console import print_error
from llamarack.errors import LlamarackError, UsageError
from llamarack.version import __version__

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

app = typer.Typer(
    name="llamarack",
    help="Plan, serve, measure and prove a private LLaMA inference service on one server.",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _register(asked: str | None) -> None:
    for name in [asked] if asked in _COMMANDS else _COMMANDS:
        module = import_module(f"llamarack.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llamarack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """The console script. Exit codes: the table in `errors`; 130 and 143 for signals."""
    try:
        # Inside, since the imports of a command take a moment in which Ctrl-C can be typed.
        if sys.argv[1:] != ["--version"]:  # which needs none of the commands
            _register(next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None))
        code = app(standalone_mode=False)
    except LlamarackError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Abort:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's own end; `| head` has seen what it wanted
            sys.exit(0)
        raise
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            text = error.format_message() if hasattr(error, "format_message") else str(error)
            print_error(UsageError(text, hint="llamarack --help"))
            sys.exit(2)
        from llamarack.cli.last_resort import as_told  # the rare path pays for its imports

        told = as_told(error)
        print_error(told)
        sys.exit(told.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
