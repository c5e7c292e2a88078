"""A status record as a rack with two cards would write it, hand-made, and a supervisor that answers with it."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from llamarack.config import Defaults, Gateway
from llamarack.gateway.admission import Admission
from llamarack.gateway.dashboard import Dashboard
from llamarack.gateway.keys import Keys
from llamarack.gateway.metrics import Metrics
from llamarack.gateway.server import GatewayServer
from llamarack.supervise.table import ModelRow, ReplicaRow, Table

GIB = 1024**3
NOW = 1_700_000_000.0
UUIDS = ("GPU-5d2f0c1e-0000-4000-8000-000000000001", "GPU-5d2f0c1e-0000-4000-8000-000000000002")


def replica(number: int, **words: Any) -> dict[str, Any]:
    planned = {"weights_bytes": 26 * GIB, "kv_bytes": 40 * GIB, "compute_bytes": 2 * GIB, "context_bytes": GIB // 2}
    total = sum(planned.values())
    return {
        "id": f"llama2-13b-chat-{number}",
        "engine": "vllm",
        "state": "ready",
        "pid": 4100 + number,
        "pids": [4100 + number],
        "restarts": 0,
        "last_death": None,
        "ready_since_unix_s": NOW - 86_400 * 2 - 5000,
        "start_seconds": 74.2,
        "endpoint": "unix:/run/engine.sock",
        "cards": [UUIDS[number % 2]],
        "running": 11 + 3 * number,
        "waiting": 0,
        "slots_total": 32,
        "slots_idle": 18,
        "context_tokens": 4096,
        "predicted": {
            "total_bytes": total,
            "cards": [{"memory_total_bytes": 141 * GIB}],
            "speed": {"first_token_s": 0.072, "per_token_s": 0.0121, "tokens_per_s": 2300.0},
        },
        "actual": {
            "resident_bytes": 5 * GIB,
            "card_held_bytes": {UUIDS[number % 2]: int(total * 1.004)},
            "terms": [
                {"device": "CUDA0", "term": name, "predicted_bytes": size, "actual_bytes": int(size * 1.003),
                 "error_fraction": -0.003}
                for name, size in planned.items()
            ],
        },
        "degraded_from": None,
        "log": "/run/engine.log",
        **words,
    }  # fmt: skip


def card(number: int, **words: Any) -> dict[str, Any]:
    used = 68.9 * GIB
    history = [
        {
            "at": NOW - 3600 + 60 * i,
            "memory_used_bytes": used * (0.2 if i < 6 else 0.97 + 0.02 * math.sin(i / 5 + number)),
        }
        for i in range(61)
    ]
    return {
        "index": number,
        "uuid": UUIDS[number],
        "name": "NVIDIA H200",
        "memory_total_bytes": 141 * GIB,
        "memory_used_bytes": int(used + 1.9 * GIB * number),
        "memory_by_owner": [
            {"pid": 4100 + number, "replica": f"llama2-13b-chat-{number}", "bytes": int(used)},
            *([{"pid": 990, "replica": None, "bytes": int(1.9 * GIB)}] if number else []),
        ],
        "utilisation_fraction": 0.87 - 0.06 * number,
        "memory_utilisation_fraction": 0.61,
        "power_w": 498.0 + 21 * number,
        "temperature_c": 58.0 + number,
        "sm_clock_hz": 1.98e9,
        "throttle_reasons": [],
        "ecc_uncorrected": 0,
        "xid": None,
        "history": history,
        **words,
    }


def traffic(model: str = "llama2-13b-chat") -> dict[str, Any]:
    return {
        "model": model,
        "window_s": 300,
        "tokens_per_s": 1934.0,
        "requests_per_s": 7.3,
        "tokens": 580_000,
        "requests": 2190,
        "failures": 0,
        "first_token_s": {"n": 2190, "p50": 0.081, "p90": 0.144, "p99": 0.412},
        "per_token_s": {"n": 2190, "p50": 0.0127, "p90": 0.0151, "p99": 0.0204},
        "tokens_per_s_history": [1500 + 420 * math.sin(i / 6) + 90 * math.sin(i * 1.7) for i in range(59)],
        "queued": 3,
    }


def event(
    message: str, *, ago_s: float = 60.0, kind: str = "note", severity: str = "info", **words: Any
) -> dict[str, Any]:
    return {"time_unix_s": NOW - ago_s, "kind": kind, "severity": severity, "message": message, "replica": None,
            "data": {}, "schema_version": 1, **words}  # fmt: skip


def status(**words: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "rack": "llama2",
        "time_unix_s": NOW,
        "started_unix_s": NOW - 86_400 * 2 - 5200,
        "draining": False,
        "models": [{"name": "llama2-13b-chat", "replicas": [replica(0), replica(1)]}],
        "gateway": {
            "host": "127.0.0.1",
            "port": 8080,
            "tls": False,
            "workers": [{"worker": 0, "pid": 4000, "connected": True}],
            "is_current": True,
            "running": 25,
            "queued": 3,
            "traffic": [traffic()],
        },
        "cards": [card(0), card(1)],
        "host": {"cpu_fraction": 0.23, "memory_used_bytes": 61 * GIB, "memory_total_bytes": 512 * GIB},
        "links": [
            {"index": i, "peer_index": 1 - i, "kind": "nvlink", "lanes": 18, "bandwidth_bytes_per_s": 450e9}
            for i in range(2)
        ],
        "events": [
            event("loads llama-2-13b-chat with vllm", ago_s=5200, replica="llama2-13b-chat-0"),
            event("ready after 1 min 14 s", ago_s=5126, kind="ready", replica="llama2-13b-chat-0"),
            event("card 1 is used by another process (990, 1.9 GiB)", ago_s=2400, severity="warning",
                  kind="foreign_memory", data={"hint": "nvidia-smi shows it; the plan counts it as taken"}),
            event("ready after 1 min 16 s", ago_s=5040, kind="ready", replica="llama2-13b-chat-1"),
        ],
        **words,
    }  # fmt: skip


class Supervisor:
    """Answers `status` on a socket with `record`; `asked` counts."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                assert json.loads(line) == {"op": "status"}
                self.asked += 1
                writer.write(json.dumps(self.record).encode() + b"\n")
        writer.close()


@contextlib.asynccontextmanager
async def gateway_of(
    folder: Path, record: dict[str, Any], *, keys: Keys | None = None, replicas: Sequence[ReplicaRow] = ()
) -> AsyncIterator[tuple[str, Supervisor]]:
    """The real gateway server on this event loop, over that supervisor: (its URL, the supervisor)."""
    supervisor = Supervisor(record)
    path = folder / "rack.sock"
    admin = await asyncio.start_unix_server(supervisor.serve, str(path))
    settings = Gateway(port=0)
    admission = Admission(max_queue_requests=1, max_queue_s=1)
    rows = [ModelRow(name=r.model, created_unix_s=1, defaults=Defaults(), max_output_tokens=None) for r in replicas]
    admission.apply(Table(version=1, draining=False, models=tuple(rows), replicas=tuple(replicas)))
    protocol = GatewayServer(settings, admission, Metrics(), keys, dashboard=Dashboard(str(path))).protocol_factory()
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}/", supervisor
    finally:
        server.close()
        await protocol.shutdown(5.0)
        admin.close()
