"""Options that say nothing in the form a command was given are refused: passed over, they would look obeyed."""

from __future__ import annotations

from collections.abc import Collection

import typer

from llamarack.errors import UsageError


def refuse_unused(context: typer.Context, used: Collection[str], *, form: str, hint: str) -> None:
    """`used`: names of the command's parameters; `form`: what was asked for, such as `--table`; `hint`: what to type.

    Raises UsageError naming the first parameter that was given and is not of them.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in used or source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
            continue
        shown = parameter.opts[0] if parameter.opts[0].startswith("-") else (parameter.metavar or name)
        raise UsageError(f"`{shown}` says nothing with {form}", hint=hint)
