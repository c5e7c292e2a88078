"""The reference engine: a small worker over PyTorch and transformers, on one card or the processor.

Slow on purpose: it shares no code with the engines that it judges.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from llamarack.config import Group
from llamarack.engine.adaptor import Diagnosis, FatalLine, Launch, LaunchContext
from llamarack.engine.chat_template import template_text
from llamarack.engine.device_memory import DeviceTerms
from llamarack.engine.dialect import Endpoint
from llamarack.engine.dialects import TransformersDialect
from llamarack.engine.installed import engine_for
from llamarack.engine.llamacpp import KEY_VARIABLE, diagnose_by_lines
from llamarack.environment import engine_environment
from llamarack.errors import ConfigError
from llamarack.plan.record import Candidate

_WORKER = Path(__file__).with_name("transformers_worker.py")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_FATAL = (
    FatalLine(
        pattern=r"(CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate memory)",
        cause="out_of_memory",
        message="the engine could not get the memory it asked for",
        hint="use a smaller model, or engine_args: {dtype: bfloat16}",
    ),
    FatalLine(
        pattern=r"(Can't load tokenizer for|Couldn't instantiate the backend tokenizer|Tokenizer class \S+ does not)",
        cause="missing_tokenizer",
        message="the model's folder has no tokenizer that transformers can read",
        hint="copy tokenizer.json and tokenizer_config.json beside the weights, or set models[].tokenizer",
    ),
    FatalLine(
        pattern=r"(SafetensorError|Error while deserializing header|incomplete metadata, file not fully covered)",
        cause="model_file_damaged",
        message="a safetensors file is damaged or incomplete",
        hint="compare sizes and SHA-256 with the source and copy the file again",
    ),
    FatalLine(
        pattern=r"model type `(\S+)` but Transformers does not recognize this architecture",
        cause="unsupported_architecture",
        message="this transformers does not know the architecture {0}",
        hint="install a newer one: llamarack engine install transformers --version X",
    ),
)


class Transformers(TransformersDialect):
    def prepare(self, group: Group, *, on_cards: bool) -> None:
        engine_for(group, on_cards=on_cards)
        _dtype(group)

    def launch(self, context: LaunchContext) -> Launch:
        engine = engine_for(context.group, on_cards=bool(context.card_uuids))
        template = context.model.chat_template
        options = {
            "model": str(context.path),
            "tokenizer": str(context.model.tokenizer or context.path),
            "chat_template": None if template is None else template_text(template),
            "served_name": context.model.name,
            "context_tokens": context.candidate.context_tokens,
            "threads": None if context.card_uuids else context.candidate.threads,
            "dtype": _dtype(context.group),
            "socket": str(context.socket),
        }
        path = context.files / "transformers.json"
        path.write_text(json.dumps(options, indent=1))
        return Launch(
            argv=[str(engine.python), "-I", "-u", str(_WORKER), str(path)],
            env=engine_environment(os.environ, context.card_uuids, {**context.group.env, KEY_VARIABLE: context.key}),
            endpoint=Endpoint(socket=context.socket, port=None, key=context.key, served_name=context.model.name),
        )

    def diagnose(self, exit_words: str, log_tail: Sequence[str]) -> Diagnosis:
        return diagnose_by_lines(_FATAL, exit_words, log_tail)

    def load_fraction(self, log_tail: Sequence[str]) -> float | None:
        return None  # its bar counts tensors on one line that the log does not split

    def require_planned(self, candidate: Candidate, group: Group, log_lines: Sequence[str]) -> None:
        pass

    def build(self, group: Group, *, on_cards: bool) -> str | None:
        return None

    def device_terms(self, log_lines: Sequence[str]) -> Sequence[DeviceTerms]:
        return ()  # it does not tell


def _dtype(group: Group) -> str:
    """The one option that engine_args may give. Raises ConfigError for others and for unknown types."""
    for name in group.engine_args:
        if name != "dtype":
            raise ConfigError(f"engine_args.{name} is no option of this engine", hint="it has one: dtype")
    dtype = group.engine_args.get("dtype", "auto")
    if dtype not in _DTYPES:
        raise ConfigError(f"engine_args.dtype: `{dtype}` is not one of {', '.join(_DTYPES)}", hint="dtype: float32")
    return str(dtype)
