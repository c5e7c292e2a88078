"""A vLLM replica that spans several machines: which of its ranks run on this one. Pure.

vLLM's own launch (`--nnodes`, `--node-rank`) deals the ranks out evenly and in order (`config/parallel.py`,
0.32.0), so what a node holds follows from the two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarack.config import Group
from llamarack.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`ranks`: those that run on this machine, node 0, of `world` in all."""

    count: int
    ranks: range
    world: int


def engine_flags(group: Group) -> dict[str, str | int | float | bool | None]:
    """`engine_args` by the long option's name, without its dashes."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in group.engine_args.items()}


def node_of(group: Group) -> Node:
    """Read from `engine_args`. Raises ConfigError for numbers that do not make a set of nodes."""
    world = group.tensor_parallel * group.pipeline_parallel
    given = engine_flags(group)
    if group.engine != "vllm" or "nnodes" not in given:
        return Node(count=1, ranks=range(world), world=world)
    count = _whole(given, "nnodes", least=1, most=world)
    if _whole(given, "node-rank", least=0, most=count - 1):
        raise ConfigError(
            "engine_args.node-rank: only node 0 answers requests, so the rack runs there",
            hint="node-rank: 0 here; start the other nodes with vllm serve ... --headless (docs/vllm.md)",
        )
    if world % count:
        raise ConfigError(
            f"engine_args.nnodes: {world} ranks (tensor_parallel x pipeline_parallel) do not divide by {count} nodes",
            hint="every node runs the same number of ranks",
        )
    return Node(count=count, ranks=range(world // count), world=world)


def _whole(given: dict[str, str | int | float | bool | None], name: str, *, least: int, most: int) -> int:
    value = given.get(name, 0)
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ConfigError(f"engine_args.{name}: {value} given", hint=f"a whole number from {least} to {most}")
    return number
