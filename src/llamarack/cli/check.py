"""`llamarack check [FILE]`: what is wrong with this machine, and with what a deployment file asks of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape

from llamarack import config
from llamarack.cli.console import data, print_json
from llamarack.config import Deployment, Group, Model
from llamarack.engine.installed import installed_engines
from llamarack.errors import HardwareError, LlamarackError
from llamarack.hardware.check import Request, findings, gather, worst_first
from llamarack.hardware.evidence import Evidence, Wanted
from llamarack.hardware.finding import Finding, Severity
from llamarack.hardware.machine import Machine
from llamarack.hardware.memory_speed import remember_bandwidth
from llamarack.hardware.summary import summary_lines
from llamarack.model.check import check_identity
from llamarack.model.completeness import check_completeness
from llamarack.model.read import read_model
from llamarack.model.spec import ModelSpec
from llamarack.plan.planner import plan_group
from llamarack.plan.record import Candidate
from llamarack.units import format_bytes

SCHEMA_VERSION = 1
_MARKS = {Severity.ERROR: "[bold red]error[/]", Severity.WARNING: "[yellow]warning[/]", Severity.NOTE: "[dim]note[/]"}
# Options of llama.cpp that lock the model in memory.
_LOCKING = ("mlock", "use_mlock", "use-mlock")
_DEPLOYMENT_SUFFIXES = (".yaml", ".yml")


def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE|MODEL]", help="A deployment file or a model to check as well.")
    ] = None,
    python: Annotated[
        list[Path] | None, typer.Option(help="Interpreter with torch, such as vLLM's; may be repeated.")
    ] = None,
    functional: Annotated[
        bool, typer.Option(help="Run the tests that put load on the cards: copies, products, an all-reduce.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the record instead of text.")] = False,
) -> None:
    """Find what is wrong with this machine. It takes a minute and no root; exit status 3 where something is."""
    deployment = config.load(file).deployment if file is not None and file.suffix in _DEPLOYMENT_SUFFIXES else None
    known = [engine.python for engine in installed_engines()]
    request = request_of(deployment, (*(python or ()), *known), functional=functional)
    if file is not None and deployment is None:
        request = dataclasses.replace(request, model_paths=(file,))
    evidence = gather(request)
    host = evidence.machine.host
    if functional and host.memory_bandwidth_bytes_per_s is not None:
        remember_bandwidth(host, host.memory_bandwidth_bytes_per_s)
    found = list(findings(evidence))
    hung = {look.subject for look in evidence.unanswered if look.hung}
    if deployment is not None:
        found += deployment_findings(deployment, evidence.machine, hung)
    elif file is not None and str(file) not in hung:
        found += _model_findings(file)[1]
    ordered = worst_first(found)
    if json:
        print_json(orjson.dumps(record(evidence, ordered), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
    else:
        _print(evidence, ordered)
    if any(finding.severity is Severity.ERROR for finding in ordered):
        raise typer.Exit(HardwareError.exit_code)


def request_of(deployment: Deployment | None, interpreters: tuple[Path, ...], *, functional: bool) -> Request:
    """What the file makes worth looking at. The all-reduce runs over its largest group of cards named by index.

    `interpreters`: of engines besides those that the file names.
    """
    if deployment is None:
        return Request(interpreters=interpreters, functional=functional)
    pairs = [(model, group) for model in deployment.models for group in model.groups]
    groups = [group for _, group in pairs]
    lists = [[card for card in cards if isinstance(card, int)] for group in groups for cards in group.gpu_lists() or []]
    largest = max(lists, key=len, default=[])
    named = [group.engine_python for group in groups if group.engine_python]
    gateway = deployment.gateway
    return Request(
        model_paths=tuple(dict.fromkeys(model.path_of(group) for model, group in pairs)),
        interpreters=tuple(dict.fromkeys([*named, *interpreters])),
        binaries=tuple(group.engine_binary for group in groups if group.engine_binary),
        listen=((gateway.host, gateway.port),) if gateway.port else (),
        card_indices=tuple(largest) or None,
        functional=functional,
        wanted=Wanted(
            engines=frozenset(group.engine for group in groups if group.gpus),
            locks_memory=any(group.engine_args.get(option) for group in groups for option in _LOCKING),
        ),
    )


def deployment_findings(deployment: Deployment, machine: Machine, hung: set[str]) -> list[Finding]:
    """Models and plans, group after group on what the ones before left. `hung`: paths that do not answer."""
    found: list[Finding] = []
    claimed: dict[int, int] = {}
    for model in deployment.models:
        for group in model.groups:
            path = model.path_of(group)
            if str(path) in hung:
                continue
            spec, problems = _model_findings(path, model.tokenizer)
            found += problems
            if spec is not None:
                found += _plan_findings(spec, model, group, machine, claimed)
    return list(dict.fromkeys(found))


def _model_findings(path: Path, tokenizer: Path | None = None) -> tuple[ModelSpec | None, list[Finding]]:
    """Identity and completeness. Checksums are left out: reading a whole model takes longer than a check may."""
    try:
        spec = read_model(path)
    except LlamarackError as error:
        return None, [_of_error(error, str(path), "the engine cannot load it")]
    try:
        return spec, [*check_completeness(spec, checksums=False), *check_identity(spec, tokenizer)]
    except LlamarackError as error:
        return spec, [_of_error(error, str(tokenizer or path), "its tokenizer cannot be held against the weights")]


def _plan_findings(
    spec: ModelSpec, model: Model, group: Group, machine: Machine, claimed: dict[int, int]
) -> Iterator[Finding]:
    try:
        candidate = plan_group(spec, group, machine, model_name=model.name, claimed_bytes=claimed)
    except LlamarackError as error:
        yield _of_error(error, model.name, "serve refuses it")
        return
    if not candidate.fits or candidate.tight:
        yield Finding(
            code="plan_tight" if candidate.fits else "plan_does_not_fit",
            severity=Severity.WARNING if candidate.fits else Severity.ERROR,
            subject=f"{model.name}, {group.engine}",
            seen="; ".join(candidate.reasons) or _needs(candidate),
            why="it fits, with little to spare" if candidate.fits else "serve refuses what does not fit",
            fix=f"llamarack plan {model.path_of(group)} --explain; lower limits.context_tokens or limits.sequences",
        )
    for cards in candidate.replica_cards:
        for index, card in zip(cards, candidate.cards, strict=False):
            claimed[index] = claimed.get(index, 0) + card.total_bytes


def _needs(candidate: Candidate) -> str:
    return "; ".join(
        f"card {card.index}: {format_bytes(card.total_high_bytes)} needed, {format_bytes(card.memory_free_bytes)} free"
        for card in candidate.cards
    )


def _of_error(error: LlamarackError, subject: str, why: str) -> Finding:
    return Finding(
        code=error.code,
        severity=Severity.ERROR,
        subject=subject,
        seen=error.message,
        why=why,
        fix=error.hint or "llamarack support collects what a report needs",
    )


def record(evidence: Evidence, found: tuple[Finding, ...]) -> dict[str, Any]:
    """`check --json`: an unlimited limit is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hardware": evidence.machine,
        "driver_status": evidence.driver_status,
        "environment": evidence.environment,
        "engines": evidence.builds,
        "disks": [dataclasses.asdict(disk) | {"predicted_read_s": disk.predicted_read_s} for disk in evidence.disks],
        "functional": evidence.functional,
        "findings": found,
    }


def _print(evidence: Evidence, found: tuple[Finding, ...]) -> None:
    for line in summary_lines(evidence):
        data.print(escape(line))
    data.print()
    for finding in found:
        data.print(f"{_MARKS[finding.severity]} [bold]{finding.code}[/]  {escape(finding.subject)}")
        data.print(f"  seen  {escape(finding.seen)}\n  why   {escape(finding.why)}\n  fix   {escape(finding.fix)}")
    counts = {severity: sum(finding.severity is severity for finding in found) for severity in Severity}
    if counts[Severity.ERROR]:
        data.print(f"\n[bold red]not ready[/]: {_counted(counts)}")
    else:
        data.print(f"{chr(10) if found else ''}[bold green]ready[/]{': ' if found else ''}{_counted(counts)}")


def _counted(counts: dict[Severity, int]) -> str:
    return ", ".join(
        f"{count} {severity.value}{'s' if count > 1 else ''}" for severity, count in counts.items() if count
    )
