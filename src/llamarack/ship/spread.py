"""The model of a deployment file that vLLM spreads over several machines, if there is one. Pure.

Such a group has `engine_args: {nnodes: ..., master-addr: ...}` (docs/vllm.md). Node 0 runs the whole rack; every other
node runs its part of that one model with `llamarack node`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamarack.config import Deployment, Gateway, Group, Model
from llamarack.engine.command_line import dashed
from llamarack.errors import UsageError
from llamarack.plan.nodes import node_of

_ADDRESS = "master-addr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """`nodes`: machines, node 0 among them; `ranks`: of the group on each of them."""

    model: Model
    group: Group
    nodes: int
    ranks: int

    @property
    def address(self) -> str:
        """Where node 0 is, as the file has it; vLLM's own default otherwise."""
        given = {dashed(name): value for name, value in self.group.engine_args.items()}
        return str(given.get(_ADDRESS) or "127.0.0.1")

    @property
    def is_here_alone(self) -> bool:
        """Nobody else can reach it there."""
        return self.address == "localhost" or self.address.startswith("127.")


def spreads_of(deployment: Deployment) -> Sequence[Spread]:
    """Every group with `nnodes`. Raises ConfigError for numbers that make no set of nodes."""
    found = []
    for model in deployment.models:
        for group in model.groups:
            node = node_of(group)
            if node.count > 1:
                found.append(Spread(model=model, group=group, nodes=node.count, ranks=len(node.ranks)))
    return found


def named_spread(deployment: Deployment, wanted: str | None) -> Spread:
    """That of model `wanted`, or the only one. Raises UsageError where there is none or the name is open."""
    spreads = [one for one in spreads_of(deployment) if wanted in (None, one.model.name)]
    if not spreads:
        said = "no model of the file spans" if wanted is None else f"`--model {wanted}`: no such model spans"
        raise UsageError(
            f"{said} several nodes",
            hint="engine: vllm with engine_args: {nnodes: 2, master-addr: ADDRESS-OF-NODE-0} makes one; docs/vllm.md",
        )
    if len(spreads) > 1:
        names = ", ".join(f"`{one.model.name}`" for one in spreads)
        raise UsageError(
            f"{len(spreads)} groups span several nodes: {names}", hint=f"--model {spreads[0].model.name} names one"
        )
    return spreads[0]


def spread_of(deployment: Deployment) -> Spread | None:
    """The only one, for service files. Raises UsageError for several, and for copies of one."""
    spreads = spreads_of(deployment)
    if not spreads:
        return None
    if len(spreads) > 1:
        names = ", ".join(f"`{one.model.name}`" for one in spreads)
        raise UsageError(f"{names} all span several nodes", hint="give each a deployment file of its own")
    (spread,) = spreads
    if spread.group.replicas > 1:
        raise UsageError(
            f"model `{spread.model.name}`: replicas: {spread.group.replicas} copies of a model that spans nodes would "
            "meet at one address and port",
            hint="replicas: 1, and export a second rack for the second copy",
        )
    return spread


def required_spread(deployment: Deployment, rank: int) -> Spread:
    """For the file of another node than the first. Raises UsageError where there is no node `rank`."""
    spread = spread_of(deployment)
    count = 1 if spread is None else spread.nodes
    if spread is None or not 1 <= rank < count:
        raise UsageError(
            f"`--node-rank {rank}`: the models of this file span {count} node{'s' if count > 1 else ''}",
            hint=f"--node-rank 0 to {count - 1}" if count > 1 else "leave --node-rank out",
        )
    return spread


def alone(deployment: Deployment, spread: Spread) -> Deployment:
    """The deployment with that group and nothing else: all that the other nodes run, without a door and its keys."""
    model = replace(spread.model, groups=[spread.group], fallbacks=[])
    return replace(deployment, models=[model], gateway=Gateway())


def with_address(deployment: Deployment, spread: Spread, node_0: str) -> Deployment:
    """The same with node 0 at another address, such as the name that a cluster gives it."""

    def of_group(group: Group) -> Group:
        if group is not spread.group:
            return group
        kept = {name: value for name, value in group.engine_args.items() if dashed(name) != _ADDRESS}
        return replace(group, engine_args={**kept, _ADDRESS: node_0})

    models = [replace(model, groups=[of_group(group) for group in model.groups]) for model in deployment.models]
    return replace(deployment, models=models)
