"""A rack of fake engines in a process of its own, so that its supervisor can be killed.

`python -m tests.fake_rack FOLDER REPLICAS_JSON [ROOM_BYTES]`: FOLDER holds the state; REPLICAS_JSON is a list of fault
objects, one a replica. Prints one line when every replica is ready or failed, and the gateway's port in it.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, parse
from llamarack.engine.adaptor import Adaptor
from llamarack.paths import RackPaths, rack_paths
from llamarack.supervise.preparing import Prepared
from llamarack.supervise.rack import run_supervisor
from llamarack.supervise.supervisor import Source, Supervisor
from tests.fake_adaptor import FakeEngine, fake_plan_again, fake_spec


class FakeSupervisor(Supervisor):
    """Lays out fake engines: a group a replica, its `engine_args` the faults. `room_bytes`: what the host has for all
    of them; None for plenty."""

    room_bytes: int | None = None

    async def prepare(self, deployment: Deployment) -> Prepared:
        return Prepared(deployment=deployment, specs=specs_of(deployment))

    def adaptors(self) -> Mapping[str, Adaptor]:
        return {"llamacpp": FakeEngine()}

    async def free_bytes(self) -> Mapping[int, int]:
        await asyncio.sleep(0)  # as the real one, which asks in a thread
        if self.room_bytes is None:
            return {-1: 2**40}
        living = [replica for replica in self.replicas if replica.child is not None and replica.child.exit is None]
        return {-1: self.room_bytes - sum(card.total_bytes for each in living for card in each.spec.candidate.cards)}


def paths_in(folder: Path) -> RackPaths:
    return rack_paths("fake", folder)


def build(folder: Path, replicas: list[dict[str, Any]], **supervise: Any) -> FakeSupervisor:
    """A supervisor over fake engines on a free port; `supervise` overrides that section of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    deployment = deployment_of(folder, replicas, supervise=supervise)
    return FakeSupervisor(
        deployment,
        specs_of(deployment),
        paths_in(folder),
        planner=fake_plan_again,
        source=Source(path=folder / "fake.yaml"),
    )


def deployment_of(folder: Path, replicas: Sequence[dict[str, Any]], **sections: Any) -> Deployment:
    """What the file of such a rack says. `replicas`: faults of each, and `model`, `slots`, `context_tokens`."""
    models: dict[str, dict[str, Any]] = {}
    for given in replicas:
        faults = dict(given)
        name = faults.pop("model", "fake")
        path = folder / f"{name}.gguf"
        if not path.exists():
            path.write_bytes(b"GGUF")
        model = models.setdefault(name, {"name": name, "path": str(path), "groups": []})
        model["on_out_of_memory"] = faults.pop("on_out_of_memory", "degrade")
        model["fallbacks"] = [str(each) for each in faults.pop("fallbacks", ())]
        limits = {"sequences": faults.pop("slots", 4), "context_tokens": faults.pop("context_tokens", 100_000)}
        model["groups"].append({"gpus": [], "limits": limits, "engine_args": faults})
    gateway = {"port": 0, **sections.get("gateway", {})}
    supervise = {"drain_s": 20, **sections.get("supervise", {})}
    return parse(json.dumps({"models": list(models.values()), "gateway": gateway, "supervise": supervise})).deployment


def specs_of(deployment: Deployment) -> list[Any]:
    specs = []
    for model in deployment.models:
        for number, group in enumerate(model.groups):
            faults: dict[str, Any] = dict(group.engine_args)
            specs.append(
                fake_spec(
                    f"{model.name}-{number}",
                    model.path.parent,
                    model=model.name,
                    slots=group.limits.sequences,
                    context_tokens=group.limits.context_tokens,
                    on_out_of_memory=model.on_out_of_memory,
                    fallbacks=model.fallbacks,
                    **faults,
                )
            )
    return specs


async def _main() -> None:
    supervisor = build(Path(sys.argv[1]), json.loads(sys.argv[2]))
    supervisor.room_bytes = json.loads(sys.argv[3]) if len(sys.argv) > 3 else None

    async def settled(supervisor: Supervisor, all_ready: bool) -> bool:
        print(json.dumps({"ready": all_ready, "port": supervisor.gateways.port}), flush=True)
        return True

    await run_supervisor(supervisor, on_entry=lambda entry: None, once_settled=settled)


if __name__ == "__main__":
    asyncio.run(_main())
