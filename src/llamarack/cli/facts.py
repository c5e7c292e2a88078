"""What a deployment is, read for a record that will be compared: model, engine, cut, hardware."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path

from llamarack.config import Deployment, Group, Model
from llamarack.engine.installed import engine_for
from llamarack.errors import LlamarackError, UsageError
from llamarack.hardware.detect import detect_machine
from llamarack.judge.facts import Facts, facts_of, save_facts
from llamarack.judge.proofs import Proof, remember
from llamarack.paths import RackPaths


def read_facts(deployment: Deployment, served: Model) -> Facts:
    """Raises ModelError, HardwareError where the driver is sick."""
    return facts_of(deployment, served, detect_machine(), engine_version=engine_version(served.groups[0]))


def engine_version(group: Group) -> str | None:
    """None where it cannot be told without starting the engine."""
    try:
        if group.engine == "llamacpp":
            return None if group.engine_binary else importlib.metadata.version("xllamacpp")
        return engine_for(group, on_cards=False).version
    except (LlamarackError, importlib.metadata.PackageNotFoundError):
        return None


def chosen_model(deployment: Deployment, model: str | None, *, option: str = "--model") -> Model:
    """`option`: what chooses it on the caller's command line. Raises UsageError where several could be meant."""
    names = [one.name for one in deployment.models]
    if model is None and len(names) > 1:
        raise UsageError(f"the file has {len(names)} models: {', '.join(names)}", hint=f"{option} {names[0]}")
    if model is not None and model not in names:
        listed = ", ".join(names)
        raise UsageError(f"`{option} {model}` is not in the file; there are: {listed}", hint=f"{option} {names[0]}")
    return next(one for one in deployment.models if model in (None, one.name))


def leave_facts(deployment: Deployment, model: str | None, folder: Path, paths: RackPaths, *, is_valid: bool) -> None:
    """Beside a bench result, for `compare`; a valid one is remembered as a proof of the rack's settings."""
    facts = read_facts(deployment, chosen_model(deployment, model))
    save_facts(facts, folder)
    if is_valid and facts.deployment_sha256 is not None:
        proof = Proof(
            at_unix_s=time.time(),
            deployment_sha256=facts.deployment_sha256,
            verdict="valid",
            folder=str(folder.absolute()),
        )
        remember(paths, "bench", proof)
