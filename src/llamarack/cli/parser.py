"""The parser of all commands. Only the module of the command that was asked for is imported."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from llamarack.cli import _COMMANDS
from llamarack.errors import UsageError
from llamarack.version import __version__

app = typer.Typer(
    name="llamarack",
    help="Plan, serve, measure and prove a private LLaMA inference service on one server.",
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def register(asked: str | None) -> None:
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


def run() -> int:
    """The command of this process. Returns its exit code. Raises UsageError for a command line that it does not have,
    and what the command raises."""
    if sys.argv[1:] != ["--version"]:  # which needs none of the commands
        register(next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None))
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        return 130
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            text = error.format_message() if hasattr(error, "format_message") else str(error)
            raise UsageError(text, hint="llamarack --help") from None
        raise
    return code if isinstance(code, int) else 0
