"""`llamarack plan`: what each card will hold, how many users fit, how fast it will be, and why this split."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import orjson
import typer

from llamarack import config
from llamarack.cli.budget_text import print_budget
from llamarack.cli.console import data, people
from llamarack.cli.plan_text import print_plan
from llamarack.cli.unused_options import refuse_unused
from llamarack.cli.written import write_kept
from llamarack.config import Deployment, Group, KvDtype, Limits, Model
from llamarack.engine.builds import build_of, fit_params_of, with_rpc_devices
from llamarack.errors import UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.hardware.machine import Machine
from llamarack.model.read import read_model
from llamarack.model.spec import ModelSpec
from llamarack.plan import dry_run
from llamarack.plan.calibration import own_calibrations, read_calibrations
from llamarack.plan.catalogue import machine_of
from llamarack.plan.deployment import deployment_of, does_not_fit, served_name
from llamarack.plan.gpu_split import read_gpu_split
from llamarack.plan.machine_file import read_machine
from llamarack.plan.planner import plan_model
from llamarack.plan.ranking import FORMATS
from llamarack.plan.record import SCHEMA_VERSION, Load, Plan
from llamarack.plan.shared import plan_deployment
from llamarack.plan.table import CardSet, example_sets, llama2_rows

_DEPLOYMENT_SUFFIXES = (".yaml", ".yml")
_DEFAULT_CONTEXT_TOKENS = 4096


# What each form of the command obeys; everything else with it is refused.
_OF_TABLE = frozenset({"table", "gpus", "context", "concurrency", "input_tokens", "output_tokens", "kv_dtype", "json"})
_OF_SPLIT = frozenset({"from_", "gpus", "concurrency", "explain", "json", "output"})
_OF_FILE = frozenset({"model", "gpus", "fit_params", "explain", "json", "output"})


def plan(
    context_: typer.Context,
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL|FILE", help="A model file or folder, or a deployment file.")
    ] = None,
    engine: Annotated[Literal["auto", "llamacpp", "vllm"], typer.Option(help="Engine to plan for.")] = "auto",
    gpus: Annotated[
        str, typer.Option(help='auto (this machine), cards such as "RTX 4090 x2 + A100-80", or hardware.json.')
    ] = "auto",
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one sequence, prompt and output. Default: 4096.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 5,
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt length that speed is predicted for.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Answer length that speed is predicted for.")] = None,
    goal: Annotated[Literal["throughput", "latency"], typer.Option(help="What to rank by.")] = "throughput",
    kv_dtype: Annotated[str, typer.Option(help="Element type of the KV cache.")] = "f16",
    also: Annotated[
        list[Path] | None, typer.Option(help="The same model in another format or quantisation; may be repeated.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="JSON of factors, measured over predicted time. Default: what bench FILE learnt here."),
    ] = None,
    fit_params: Annotated[
        Path | None, typer.Option(help="llama-fit-params to compare with. Default: the one on PATH.")
    ] = None,
    explain: Annotated[bool, typer.Option(help="Show all candidates, formulas and sources.")] = False,
    table: Annotated[
        Literal["llama2"] | None,
        typer.Option(help="What LLaMA-2 7B, 13B and 70B take, on example cards or on those of --gpus; needs no model."),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A gpu-split.yaml: model_path, split_ratio, context_length, ...")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option("-o", help="Write a deployment file that `serve` accepts.")] = None,
) -> None:
    """Plan memory, speed and placement before anything is started. Exit status 4 where it does not fit."""
    if table is not None:
        refuse_unused(context_, _OF_TABLE, form="--table", hint="llamarack plan MODEL plans one model")
        load = _load(_DEFAULT_CONTEXT_TOKENS, context, concurrency, input_tokens, output_tokens)
        _print_table(gpus, load, _limits(kv_dtype), json=json)
        return
    if from_ is not None:
        refuse_unused(context_, _OF_SPLIT, form="--from", hint=f"write it into {from_}")
        _plan_split(from_, _machine(gpus), concurrency, json=json, output=output, explain=explain)
        return
    if model is None:
        raise UsageError("`MODEL` is missing", hint="llamarack plan model.gguf; or --table llama2")
    if model.suffix in _DEPLOYMENT_SUFFIXES:
        refuse_unused(
            context_, _OF_FILE, form="a deployment file",
            hint=f"edit {model}: `limits` has context_tokens, sequences and kv_dtype, a group engine and path",
        )  # fmt: skip
        _plan_file(model, gpus, fit_params, json=json, output=output, explain=explain)
        return
    machine = _machine(gpus)
    specs = _read([model, *(also or [])], engine)
    limits = _limits(kv_dtype)
    one = plan_model(
        specs[0],
        machine,
        _load(specs[0].context_train_tokens, context, concurrency, input_tokens, output_tokens),
        model_name=served_name(specs[0]),
        engines=("llamacpp", "vllm") if engine == "auto" else (engine,),
        goal=goal,
        others=specs[1:],
        limits=limits,
        calibrations=read_calibrations(calibration) if calibration is not None else own_calibrations(),
    )
    if gpus == "auto":
        _compare(one, fit_params, None)
    deployment = deployment_of(one, specs, limits, base=Path.cwd()) if one.best else None
    _finish((one,), deployment, json=json, output=output, explain=explain, specs=specs)


def _read(paths: Sequence[Path], engine: str) -> list[ModelSpec]:
    """The model's files. Raises UsageError where the asked engine can read none of them."""
    specs = [read_model(path) for path in paths]
    if engine != "auto" and all(spec.format is not FORMATS[engine] for spec in specs):
        raise UsageError(
            f"`--engine {engine}` reads {FORMATS[engine]}, `{paths[0]}` is {specs[0].format}",
            hint=f"--also /path/to/the/{FORMATS[engine]}/model",
        )
    return specs


def _machine(gpus: str) -> Machine:
    if gpus == "auto":
        return detect_machine()
    if gpus.endswith(".json"):
        return read_machine(Path(gpus))
    return machine_of(gpus)


def _limits(kv_dtype: str) -> Limits:
    names = get_args(KvDtype)
    if kv_dtype not in names:
        raise UsageError(f"`--kv-dtype`: no `{kv_dtype}`", hint="one of: " + ", ".join(names))
    return Limits(kv_dtype=kv_dtype)  # type: ignore[arg-type]  # checked the line before


def _load(
    trained: int | None, context: int | None, concurrency: int, input_tokens: int | None, output_tokens: int | None
) -> Load:
    """`trained`: the longest context that the model was trained for, in tokens."""
    tokens = context or min(_DEFAULT_CONTEXT_TOKENS, trained or _DEFAULT_CONTEXT_TOKENS)
    if (input_tokens or 0) + (output_tokens or 0) > tokens:
        raise UsageError(
            f"`--context` {tokens} is less than --input-tokens plus --output-tokens", hint="raise --context"
        )
    return Load(context_tokens=tokens, concurrency=concurrency, input_tokens=input_tokens, output_tokens=output_tokens)


def _plan_file(
    path: Path, gpus: str, fit_params: Path | None, *, json: bool, output: Path | None, explain: bool
) -> None:
    deployment_file = config.load(path).deployment
    groups = [group for one in deployment_file.models for group in one.groups]
    machine = with_rpc_devices(_machine(gpus), groups)
    found, resolved = plan_deployment(
        deployment_file, machine, read_model, build_of=lambda group: build_of(group, machine)
    )
    if gpus == "auto":
        for one, group in zip(found, groups, strict=True):
            if not any(card.is_rpc_busy for card in machine.remotes):  # they would not answer the dry run either
                _compare(one, fit_params, group)
    _finish(found, resolved, json=json, output=output, explain=explain)


def _plan_split(
    path: Path, machine: Machine, concurrency: int, *, json: bool, output: Path | None, explain: bool
) -> None:
    translated = read_gpu_split(path, sequences=concurrency)
    spec = read_model(translated.path)
    model = Model(name=served_name(spec), path=translated.path.absolute(), groups=[translated.group])
    found, deployment = plan_deployment(Deployment(schema_version=1, models=[model]), machine, lambda _: spec)
    _finish(found, deployment, json=json, output=output, explain=explain, specs=[spec])
    for note in translated.notes:
        typer.echo(note, err=True)


def _compare(one: Plan, binary: Path | None, group: Group | None) -> None:
    """The engine's own dry run beside the plan, on stderr, where there is one to ask: the one named, the one beside
    the group's llama-server, or the one on PATH. `group`: the part of the file that was planned."""
    best = one.best
    if best is None or best.engine != "llamacpp":
        return
    on_cards = any(card.index >= 0 for card in best.cards)
    found = binary or fit_params_of(group or Group(), on_cards=on_cards)
    found = found or (Path(path) if (path := shutil.which(dry_run.BINARY)) else None)
    if found is None:
        return
    servers = [address.endpoint for address in group.rpc_addresses()] if group is not None else []
    rows = dry_run.dry_run(found, best, Path(best.model_path or one.model_path), rpc_servers=servers)
    for line in dry_run.compared(best, rows) if rows else [f"{found} gave no answer"]:
        typer.echo(line, err=True)


def _finish(
    plans: Sequence[Plan],
    deployment: Deployment | None,
    *,
    json: bool,
    output: Path | None,
    explain: bool,
    specs: Sequence[ModelSpec] = (),
) -> None:
    if json:
        typer.echo(orjson.dumps(record(plans), option=orjson.OPT_INDENT_2))
    else:
        for one in plans:
            print_plan(data, one, explain=explain, specs=specs)
    for one in plans:
        if one.best is None:
            raise does_not_fit(one)
    if output is not None and deployment is not None:
        former = write_kept(output, config.to_yaml(deployment))
        kept = f" (what it was: {former})" if former else ""
        typer.echo(f"wrote {output}{kept}; next: llamarack serve {output}", err=True)


def record(plans: Sequence[Plan]) -> Any:
    """`plan --json`: the plan itself, or with several models `{schema_version, plans}`."""
    if len(plans) == 1:
        return plans[0]
    return {"schema_version": SCHEMA_VERSION, "plans": plans}


def _print_table(gpus: str, load: Load, limits: Limits, *, json: bool) -> None:
    sets = example_sets() if gpus == "auto" else (CardSet(name=gpus, machine=_machine(gpus)),)
    rows = llama2_rows(sets, load, limits)
    if json:
        names = [one.name for one in sets]
        typer.echo(orjson.dumps({"schema_version": SCHEMA_VERSION, "load": load, "cards": names, "rows": rows}))
        return
    print_budget(rows, [one.name for one in sets], load)
    if gpus == "auto":
        people.print('for your own server: --gpus "RTX 4090 x2", or --gpus hardware.json of `check --json`')
