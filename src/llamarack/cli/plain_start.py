"""`demo` and `serve` from plain words, without the parser of all commands.

That one and what it checks values with take as long to import as all the rest of a start (docs/decisions/011). Words
that are not plain, and values that the parser might refuse, are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llamarack.logs import LogFormat
from llamarack.supervise.start_words import DEMO_RACK, StartWords, understood

_LARGEST_PORT = 65535


class _NotPlain(Exception):
    """A value that the parser shall judge."""


def run_plainly(arguments: Sequence[str]) -> int | None:
    """The exit code of the command; None: it was not run, the parser has to."""
    words = understood(arguments)
    if words is None:
        return None
    try:
        return _demo(words) if words.target is None else _serve(words, words.target)
    except _NotPlain:
        return None


def _demo(words: StartWords) -> int:
    from llamarack.cli.demo_rack import MOST_REPLICAS, QUESTION, serve_demo

    replicas, port = _number(words, "--replicas", MOST_REPLICAS), _number(words, "--port", _LARGEST_PORT)
    if replicas == 0:
        raise _NotPlain
    model = words.options.get("--model")
    return serve_demo(
        replicas=1 if replicas is None else replicas,
        port=8080 if port is None else port,
        prompt=words.options.get("--prompt", QUESTION),
        once="--once" in words.flags,
        model=None if model is None else Path(model),
        rack=words.rack or DEMO_RACK,
        state_dir=words.state_dir,
    )


def _serve(words: StartWords, target: Path) -> int:
    from llamarack.cli.serving import serve_target

    form = words.options.get("--log-format")
    if form not in {None, *LogFormat}:
        raise _NotPlain
    return serve_target(
        target,
        host=words.options.get("--host"),
        port=_number(words, "--port", _LARGEST_PORT),
        rack=words.rack,
        state_dir=words.state_dir,
        detach=False,
        log_format=None if form is None else LogFormat(form),
    )


def _number(words: StartWords, name: str, most: int) -> int | None:
    """None where it was not given."""
    text = words.options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= most):
        raise _NotPlain
    return int(text)
