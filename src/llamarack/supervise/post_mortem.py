"""Why an engine went down, and whether another start can end otherwise: from how it ended and what it said."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from llamarack.engine.adaptor import Adaptor, Diagnosis
from llamarack.errors import LlamarackError, NeverReady
from llamarack.hardware.host import read_cgroup_limits, read_host
from llamarack.supervise.degrade import OUT_OF_MEMORY
from llamarack.supervise.keeping import ChildExit
from llamarack.supervise.replica_record import ReplicaSpec
from llamarack.units import format_bytes

INTERNAL_ERROR = "internal_error"
# Causes that the same start meets again; the rest may pass.
_HOPELESS = frozenset(
    {
        *("model_file_damaged", "missing_tokenizer", "unsupported_architecture", "unsupported_quantization"),
        *("bad_option", "context_too_long", "heads_not_divisible", "kv_cache_too_small", "kv_dtype_needs_bfloat16"),
        *("unsupported_kv_dtype", "driver_too_old"),
    }
)


class Died(Exception):
    def __init__(self, exit: ChildExit) -> None:
        super().__init__(exit.words)
        self.exit = exit


class Condemned(Exception):
    """Judged unfit while serving, from outside: it is ended and started again."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.message)
        self.diagnosis = diagnosis


class NoRoom(NeverReady):
    """Nothing was started: the cards are taken."""

    code = "memory_not_free"


def diagnose(error: Exception, log_tail: Sequence[str], adaptor: Adaptor) -> Diagnosis:
    """`error`: Died, Condemned, or what a start met."""
    if isinstance(error, Died):
        return _of_exit(error.exit, log_tail, adaptor)
    if isinstance(error, Condemned):
        return error.diagnosis
    if isinstance(error, NeverReady):  # an engine may answer with an error before it ends
        known = adaptor.diagnose("not ready", log_tail)
        if known.cause != "unrecognised":
            return known
    if isinstance(error, LlamarackError):
        return Diagnosis(cause=error.code, message=error.message, hint=error.hint)
    if isinstance(error, OSError):  # TimeoutError among them
        return Diagnosis(cause="unrecognised", message=str(error) or type(error).__name__, hint=None)
    return Diagnosis(
        cause=INTERNAL_ERROR,
        message=f"a fault of llamarack's own: {error!r}",
        hint="llamarack support collects what its makers need; llamarack reload tries again",
    )


def is_short_of_memory(cause: str, spec: ReplicaSpec) -> bool:
    """Where the model lives in the host's memory, that is the memory a smaller plan saves."""
    return cause in OUT_OF_MEMORY or (cause == "host_out_of_memory" and not spec.card_uuids)


def why_given_up(cause: str, spec: ReplicaSpec) -> str | None:
    """In words, where the next start would end the same way."""
    if cause == "host_out_of_memory" and spec.card_uuids:
        return None  # whoever took the RAM may give it back
    if is_short_of_memory(cause, spec):
        if spec.model.on_out_of_memory == "fail":
            return "out of memory, and on_out_of_memory is fail"
        return "out of memory, and no smaller plan is left"
    return "the next start would end the same way" if cause in _HOPELESS else None


def _of_exit(exit: ChildExit, log_tail: Sequence[str], adaptor: Adaptor) -> Diagnosis:
    if exit.keeper_lost:
        return Diagnosis(cause="keeper_lost", message="its keeper was killed, and the engine with it", hint=None)
    if exit.oom_killed:
        return _host_out_of_memory("killed")
    if exit.signal is not None and exit.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        return Diagnosis(cause="killed", message=f"{exit.words} from outside", hint=None)
    known = adaptor.diagnose(exit.words, log_tail)
    if exit.oom_near and known.cause in {"unrecognised", "rank_died", "collective_failed"}:
        return _host_out_of_memory("a process of the engine was killed")
    return known


def _host_out_of_memory(who: str) -> Diagnosis:
    return Diagnosis(
        cause="host_out_of_memory",
        message=f"{who} by the host's out-of-memory killer: {_memory_in_words()}",
        hint="give the host or the container more RAM, or lower limits.sequences; the card is not at fault",
    )


def _memory_in_words() -> str:
    """What ran out: the container's limit where it is the tighter one, else the RAM."""
    host, limit = read_host(), read_cgroup_limits().memory_bytes
    if limit is not None and limit <= host.memory_total_bytes:
        return f"the cgroup's limit of {format_bytes(limit)} is used up"
    return f"the RAM of {format_bytes(host.memory_total_bytes)} is used up"
