"""A rack of fake engines in a process of its own, so that its supervisor can be killed.

`python tests/fake_rack.py FOLDER REPLICAS_JSON`: FOLDER holds the state; REPLICAS_JSON is a list of fault objects, one
a replica. Prints one line when every replica is ready or failed, and the gateway's port in it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from llamarack.config import Deployment, parse
from llamarack.paths import RackPaths, rack_paths
from llamarack.supervise.rack import run_supervisor
from llamarack.supervise.supervisor import Supervisor
from tests.fake_adaptor import fake_plan_again, fake_spec


def paths_in(folder: Path) -> RackPaths:
    return rack_paths("fake", folder)


def build(folder: Path, replicas: list[dict[str, Any]], **supervise: Any) -> Supervisor:
    """A supervisor over fake engines on a free port; `supervise` overrides that section of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = [fake_spec(f"fake-{number}", folder, **faults) for number, faults in enumerate(replicas)]
    return Supervisor(_deployment(folder, len(specs), supervise), specs, paths_in(folder), planner=fake_plan_again)


def _deployment(folder: Path, replicas: int, supervise: dict[str, Any]) -> Deployment:
    value = {
        "models": [{"name": "fake", "path": str(folder / "fake.gguf"), "replicas": replicas, "gpus": []}],
        "gateway": {"port": 0},
        "supervise": {"drain_s": 20, **supervise},
    }
    return parse(json.dumps(value)).deployment


async def _main() -> None:
    supervisor = build(Path(sys.argv[1]), json.loads(sys.argv[2]))

    async def settled(supervisor: Supervisor, all_ready: bool) -> bool:
        print(json.dumps({"ready": all_ready, "port": supervisor.gateways.port}), flush=True)
        return True

    await run_supervisor(supervisor, on_entry=lambda entry: None, once_settled=settled)


if __name__ == "__main__":
    asyncio.run(_main())
