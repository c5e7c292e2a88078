"""What a deployment file says, as records: its keys, their defaults and meaning, and what must agree between them.

Made of the standard library alone, for every process of a rack imports it before it does anything. `models` has the
bounds of the values and is imported only where a file is read; what a program builds here is not checked.
The text of a ValueError here is `key: problem; what to type`; `faults` makes a sentence of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llamarack.rpc_address import RpcAddress, parse_rpc_address

SCHEMA_VERSION = 1
Engine = Literal["llamacpp", "vllm", "transformers"]
KvDtype = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "auto", "fp8", "fp8_e5m2"]
# Kinds of values, whose bounds are in `models`.
Count = int
Bytes = int
Replicas = int
Natural = int
Port = int
Workers = int
Fraction = float
Share = float
Seconds = float
DrainSeconds = float
HeartbeatSeconds = float
Temperature = float
ModelName = str
FilePath = Path


def _says(description: str) -> Mapping[str, str]:
    return {"description": description}


class Record:
    """A section of the file."""

    __slots__ = ()

    def check(self) -> None:
        """Raises ValueError where its keys do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """What one replica may use."""

    context_tokens: Count = field(default=4096, metadata=_says("longest sequence, prompt and output, in tokens"))
    sequences: Count = field(default=8, metadata=_says("sequences at once per replica: slots, max_num_seqs"))
    batch_tokens: Literal["auto"] | Count = field(default="auto", metadata=_says("tokens of one engine step"))
    kv_dtype: KvDtype = field(default="f16", metadata=_says("element type of the KV cache"))
    kv_unified: bool = field(default=False, metadata=_says("llamacpp: one KV pool shared by all slots"))
    kv_cache_bytes: Literal["auto"] | Bytes = field(
        default="auto", metadata=_says("vllm: KV cache per card; wins over fraction")
    )
    gpu_memory_fraction: Fraction = field(default=0.90, metadata=_says("vllm: share of each card's total memory"))
    threads: Literal["auto"] | Count = field(
        default="auto", metadata=_says("CPU threads; auto: usable cores / replicas")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Record):
    """Replicas that are alike."""

    engine: Engine = field(default="llamacpp", metadata=_says("which engine runs the replicas"))
    path: FilePath | None = field(default=None, metadata=_says("model for this engine; default: the model's"))
    replicas: Replicas = field(default=1, metadata=_says("full copies of the model; requests are spread over them"))
    gpus: Literal["auto"] | list[int | str | list[int | str]] = field(
        default="auto",
        metadata=_says("card indices or UUIDs, one list per replica; [] = CPU; auto = planned at start"),
    )
    tensor_parallel: Count = field(default=1, metadata=_says("vllm: cards that share each layer"))
    pipeline_parallel: Count = field(default=1, metadata=_says("vllm: stages of whole layers"))
    split_mode: Literal["none", "layer", "tensor"] = field(
        default="layer", metadata=_says("llamacpp: how several cards share")
    )
    tensor_split: Literal["auto"] | list[Share] = field(
        default="auto", metadata=_says("llamacpp: share per card, sums to 1; auto = by free memory")
    )
    main_gpu: Natural = field(default=0, metadata=_says("llamacpp: the card used when split_mode is none"))
    gpu_layers: Literal["all"] | Natural = field(default="all", metadata=_says("llamacpp: layers on cards"))
    rpc_servers: list[str] = field(
        default_factory=list,
        metadata=_says(
            "llamacpp: host:port of RPC servers, loopback or private addresses; their devices come first. "
            "host:port=24GiB,80GiB gives the memory of each device instead of asking for it"
        ),
    )
    limits: Limits = field(default=Limits(), metadata=_says("what one replica may use"))
    engine_python: FilePath | None = field(default=None, metadata=_says("interpreter of the engine's own environment"))
    engine_binary: FilePath | None = field(default=None, metadata=_says("llama-server; default: the built-in worker"))
    engine_args: dict[str, str | int | float | bool | None] = field(
        default_factory=dict, metadata=_says("passed to the engine as they are; what this file models is refused")
    )
    env: dict[str, str] = field(default_factory=dict, metadata=_says("environment of the engine, as it is"))

    def check(self) -> None:
        if isinstance(self.tensor_split, list):
            total = sum(self.tensor_split)
            if abs(total - 1) > 0.005:
                shares = [round(share / total, 4) for share in self.tensor_split] if total > 0 else self.tensor_split
                raise ValueError(f"tensor_split: must sum to 1, sums to {total:g}; type: tensor_split: {shares}")
        lists = self.gpu_lists()
        if lists is not None and len(lists) != self.replicas:
            raise ValueError(
                f"gpus: {self.replicas} replicas need {self.replicas} lists of cards, {len(lists)} given; "
                f"type one list per replica, such as gpus: {[[i] for i in range(self.replicas)]}"
            )
        self._check_rpc_servers()

    def _check_rpc_servers(self) -> None:
        if not self.rpc_servers:
            return
        if self.engine != "llamacpp":
            raise ValueError(f"rpc_servers: engine {self.engine} has none; type engine: llamacpp, or leave them out")
        try:
            endpoints = [address.endpoint for address in self.rpc_addresses()]
        except ValueError as error:
            raise ValueError(f"rpc_servers: {error}") from None
        if len(set(endpoints)) < len(endpoints):
            raise ValueError("rpc_servers: a server is named twice; type each once: it offers all its devices")
        if self.replicas > 1:
            raise ValueError(
                f"replicas: {self.replicas} replicas would share RPC servers, which serve one client at a time; "
                "type replicas: 1 and give every further copy a group with servers of its own"
            )

    def rpc_addresses(self) -> list[RpcAddress]:
        return [parse_rpc_address(text) for text in self.rpc_servers]

    def gpu_lists(self) -> list[list[int | str]] | None:
        """Cards of each replica; None for `auto`; empty lists for the CPU."""
        if self.gpus == "auto":
            return None
        if not self.gpus:
            return [[] for _ in range(self.replicas)]
        nested = [cards for cards in self.gpus if isinstance(cards, list)]
        return nested or [[card for card in self.gpus if not isinstance(card, list)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults(Record):
    """Used when a client omits them; the same on every engine."""

    max_tokens: Count | None = field(default=512, metadata=_says("output tokens when the client names none"))
    temperature: Temperature | None = field(default=None, metadata=_says("null: the engine's own"))
    top_p: Fraction | None = field(default=None, metadata=_says("null: the engine's own"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Record):
    """One name that clients can ask for."""

    name: ModelName = field(
        metadata=_says("the id clients send: letters, digits and . _ : / @ -, a letter or digit first")
    )
    path: FilePath = field(metadata=_says("model file or folder; nothing is downloaded"))
    tokenizer: FilePath | None = field(
        default=None, metadata=_says("default: the model's; checked against the weights")
    )
    chat_template: str | None = field(default=None, metadata=_says("a known name, a file, or null for the model's own"))
    defaults: Defaults = field(default=Defaults(), metadata=_says("used when a client omits them"))
    max_output_tokens: Count | None = field(default=None, metadata=_says("cap on every request's output"))
    on_out_of_memory: Literal["degrade", "fail"] = field(
        default="degrade", metadata=_says("what to do when the engine runs out")
    )
    fallbacks: list[FilePath] = field(
        default_factory=list, metadata=_says("coarser quantisations to fall back to, in order")
    )
    groups: list[Group] = field(metadata=_says("replicas, by engine and cards"))

    def path_of(self, group: Group) -> Path:
        return group.path or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Record):
    """Keep-alives in streams that are silent."""

    style: Literal["comment", "empty_delta", "off"] = field(
        default="comment", metadata=_says("form of a keep-alive in a stream")
    )
    interval_s: HeartbeatSeconds = field(default=8.0, metadata=_says("silence before one is sent"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway(Record):
    """The front door."""

    host: str = field(default="127.0.0.1", metadata=_says("address to listen on"))
    port: Port = field(default=8080, metadata=_says("0: any free port"))
    workers: Workers = field(default=1, metadata=_says("gateway processes"))
    routing: Literal["least_loaded", "round_robin", "session"] = field(
        default="least_loaded", metadata=_says("choice of replica")
    )
    api_keys_file: FilePath | None = field(default=None, metadata=_says("made by `llamarack keys add`"))
    insecure: bool = field(default=False, metadata=_says("allow an address that is not loopback without keys"))
    tls_cert: FilePath | None = field(default=None, metadata=_says("PEM certificate chain"))
    tls_key: FilePath | None = field(default=None, metadata=_says("PEM private key"))
    max_queue_requests: Natural = field(default=256, metadata=_says("waiting requests per model"))
    max_queue_s: Seconds = field(default=30.0, metadata=_says("longest wait in the queue"))
    max_queue_tokens: Count | None = field(
        default=None, metadata=_says("prompt and output tokens waiting per model; null: any")
    )
    request_timeout_s: Seconds = field(default=600.0, metadata=_says("longest request"))
    keep_alive_s: Seconds = field(
        default=1260.0, metadata=_says("idle connections are kept this long; Java pools keep theirs 1200 s")
    )
    heartbeat: Heartbeat = field(default=Heartbeat(), metadata=_says("keep-alives in silent streams"))
    access_log: Literal["auto", "text", "json", "off"] = field(
        default="auto", metadata=_says("one line a request in the gateway's log; auto: in the form of the other logs")
    )

    def check(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"{missing}: tls_cert and tls_key go together; type {missing}: /path/to/file.pem")
        if not self.is_loopback and self.api_keys_file is None and not self.insecure:
            raise ValueError(
                f"host: `{self.host}` is not loopback and there are no keys; set api_keys_file (made by "
                "`llamarack keys add`), or insecure: true if every caller on that network may use it"
            )

    @property
    def is_loopback(self) -> bool:
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts(Record):
    """How often a replica that dies is started again."""

    max: Natural = field(default=5, metadata=_says("restarts within the window before `failed`"))
    window_s: Seconds = field(default=600.0, metadata=_says("the window"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervise(Record):
    """How engines are watched."""

    start_deadline: Literal["auto"] | Seconds = field(
        default="auto", metadata=_says("seconds from start to ready; auto: 5 min + 20 s per GiB of weights")
    )
    restarts: Restarts = field(default=Restarts(), metadata=_says("cap on restarts"))
    drain_s: DrainSeconds = field(default=60.0, metadata=_says("time for running requests at a stop"))
    sample_s: Seconds = field(default=5.0, metadata=_says("interval of the memory watch"))
    slots_idle_min: Natural = field(default=0, metadata=_says("llamacpp: fewer idle slots raise an event"))
    stuck_request_s: Seconds = field(default=300.0, metadata=_says("no progress for this long"))
    webhook: str | None = field(default=None, metadata=_says("URL that gets warning and error events as JSON"))

    def check(self) -> None:
        if self.webhook is not None and not re.match(r"https?://[^/\s]+", self.webhook):
            raise ValueError(
                f"webhook: `{self.webhook}` is not an http or https URL; type webhook: http://127.0.0.1:9000/llamarack"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(Record):
    """The whole file."""

    schema_version: Literal[1] = field(metadata=_says("version of this file's format"))
    models: list[Model] = field(metadata=_says("what is served"))
    gateway: Gateway = field(default=Gateway(), metadata=_says("the front door"))
    supervise: Supervise = field(default=Supervise(), metadata=_says("how engines are watched"))

    def check(self) -> None:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: the name `{name}` is given twice; clients could not tell them apart")
        groups = [group for model in self.models for group in model.groups]
        endpoints = [address.endpoint for group in groups for address in group.rpc_addresses()]
        for endpoint in endpoints:
            if endpoints.count(endpoint) > 1:
                raise ValueError(
                    f"models: two groups name the RPC server {endpoint}, which serves one client at a time; start a "
                    "second server on another port for the second group"
                )
