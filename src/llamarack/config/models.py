"""The deployment file's keys, their bounds and what must agree between them: strict models, unknown keys are errors.

The text of a ValueError here is `key: problem; what to type`; `faults` makes a sentence of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from llamarack.rpc_address import RpcAddress, parse_rpc_address

SCHEMA_VERSION = 1
Engine = Literal["llamacpp", "vllm", "transformers"]
KvDtype = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "auto", "fp8", "fp8_e5m2"]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]  # what engines keep in 32 bits
Seconds = Annotated[float, Field(gt=0)]
FilePath = Annotated[Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Limits(_Strict):
    """What one replica may use."""

    context_tokens: Count = Field(4096, description="longest sequence, prompt and output, in tokens")
    sequences: Count = Field(8, description="sequences at once per replica: slots, max_num_seqs")
    batch_tokens: Literal["auto"] | Count = Field("auto", description="tokens of one engine step")
    kv_dtype: KvDtype = Field("f16", description="element type of the KV cache")
    kv_unified: bool = Field(False, description="llamacpp: one KV pool shared by all slots")
    kv_cache_bytes: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="vllm: KV cache per card; wins over fraction"
    )
    gpu_memory_fraction: Fraction = Field(0.90, description="vllm: share of each card's total memory")
    threads: Literal["auto"] | Count = Field("auto", description="CPU threads; auto: usable cores / replicas")


class Group(_Strict):
    """Replicas that are alike."""

    engine: Engine = Field("llamacpp", description="which engine runs the replicas")
    path: FilePath | None = Field(None, description="model for this engine; default: the model's")
    replicas: Annotated[int, Field(ge=1, le=256)] = Field(
        1, description="full copies of the model; requests are spread over them"
    )
    gpus: Literal["auto"] | list[int | str | list[int | str]] = Field(
        "auto", description="card indices or UUIDs, one list per replica; [] = CPU; auto = planned at start"
    )
    tensor_parallel: Count = Field(1, description="vllm: cards that share each layer")
    pipeline_parallel: Count = Field(1, description="vllm: stages of whole layers")
    split_mode: Literal["none", "layer", "tensor"] = Field("layer", description="llamacpp: how several cards share")
    tensor_split: Literal["auto"] | list[Annotated[float, Field(ge=0)]] = Field(
        "auto", description="llamacpp: share per card, sums to 1; auto = by free memory"
    )
    main_gpu: Annotated[int, Field(ge=0)] = Field(0, description="llamacpp: the card used when split_mode is none")
    gpu_layers: Literal["all"] | Annotated[int, Field(ge=0)] = Field("all", description="llamacpp: layers on cards")
    rpc_servers: list[str] = Field(
        [],
        description="llamacpp: host:port of RPC servers, loopback or private addresses; their devices come first. "
        "host:port=24GiB,80GiB gives the memory of each device instead of asking for it",
    )
    limits: Limits = Field(Limits(), description="what one replica may use")
    engine_python: FilePath | None = Field(None, description="interpreter of the engine's own environment")
    engine_binary: FilePath | None = Field(None, description="llama-server; default: the built-in worker")
    engine_args: dict[str, str | int | float | bool | None] = Field(
        {}, description="passed to the engine as they are; what this file models is refused"
    )
    env: dict[str, str] = Field({}, description="environment of the engine, as it is")

    @model_validator(mode="after")
    def _consistent(self) -> Group:
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
        return self

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


class Defaults(_Strict):
    """Used when a client omits them; the same on every engine."""

    max_tokens: Count | None = Field(512, description="output tokens when the client names none")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="null: the engine's own")
    top_p: Fraction | None = Field(None, description="null: the engine's own")


class Model(_Strict):
    """One name that clients can ask for."""

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")] = Field(
        description="the id clients send: letters, digits and . _ : / @ -, a letter or digit first"
    )
    path: FilePath = Field(description="model file or folder; nothing is downloaded")
    tokenizer: FilePath | None = Field(None, description="default: the model's; checked against the weights")
    chat_template: str | None = Field(None, description="a known name, a file, or null for the model's own")
    defaults: Defaults = Field(Defaults(), description="used when a client omits them")
    max_output_tokens: Count | None = Field(None, description="cap on every request's output")
    on_out_of_memory: Literal["degrade", "fail"] = Field("degrade", description="what to do when the engine runs out")
    fallbacks: list[FilePath] = Field([], description="coarser quantisations to fall back to, in order")
    groups: Annotated[list[Group], Field(min_length=1)] = Field(description="replicas, by engine and cards")

    @model_validator(mode="before")
    @classmethod
    def _one_group_may_be_flat(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        flat = {key: value[key] for key in value if key in Group.model_fields and key not in cls.model_fields}
        rest = {key: value[key] for key in value if key not in flat}
        if "groups" not in value:
            return {**rest, "groups": [flat]}
        if flat:
            raise ValueError(f"{sorted(flat)[0]}: stands beside `groups`; move it into a group")
        return value

    def path_of(self, group: Group) -> Path:
        return group.path or self.path


class Heartbeat(_Strict):
    style: Literal["comment", "empty_delta", "off"] = Field("comment", description="form of a keep-alive in a stream")
    interval_s: Annotated[float, Field(ge=1, le=60)] = Field(8, description="silence before one is sent")


class Gateway(_Strict):
    """The front door."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="0: any free port")
    workers: Annotated[int, Field(ge=1, le=64)] = Field(1, description="gateway processes")
    routing: Literal["least_loaded", "round_robin", "session"] = Field("least_loaded", description="choice of replica")
    api_keys_file: FilePath | None = Field(None, description="made by `llamarack keys add`")
    insecure: bool = Field(False, description="allow an address that is not loopback without keys")
    tls_cert: FilePath | None = Field(None, description="PEM certificate chain")
    tls_key: FilePath | None = Field(None, description="PEM private key")
    max_queue_requests: Annotated[int, Field(ge=0)] = Field(256, description="waiting requests per model")
    max_queue_s: Seconds = Field(30, description="longest wait in the queue")
    max_queue_tokens: Count | None = Field(None, description="prompt and output tokens waiting per model; null: any")
    request_timeout_s: Seconds = Field(600, description="longest request")
    keep_alive_s: Seconds = Field(
        1260, description="idle connections are kept this long; Java pools keep theirs 1200 s"
    )
    heartbeat: Heartbeat = Field(Heartbeat(), description="keep-alives in silent streams")
    access_log: Literal["auto", "text", "json", "off"] = Field(
        "auto", description="one line a request in the gateway's log; auto: in the form of the other logs"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Gateway:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise ValueError(f"{missing}: tls_cert and tls_key go together; type {missing}: /path/to/file.pem")
        if not self.is_loopback and self.api_keys_file is None and not self.insecure:
            raise ValueError(
                f"host: `{self.host}` is not loopback and there are no keys; set api_keys_file (made by "
                "`llamarack keys add`), or insecure: true if every caller on that network may use it"
            )
        return self

    @property
    def is_loopback(self) -> bool:
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")


class Restarts(_Strict):
    max: Annotated[int, Field(ge=0)] = Field(5, description="restarts within the window before `failed`")
    window_s: Seconds = Field(600, description="the window")


class Supervise(_Strict):
    """How engines are watched."""

    start_deadline: Literal["auto"] | Seconds = Field(
        "auto", description="seconds from start to ready; auto: 5 min + 20 s per GiB of weights"
    )
    restarts: Restarts = Field(Restarts(), description="cap on restarts")
    drain_s: Annotated[float, Field(ge=0)] = Field(60, description="time for running requests at a stop")
    sample_s: Seconds = Field(5, description="interval of the memory watch")
    slots_idle_min: Annotated[int, Field(ge=0)] = Field(0, description="llamacpp: fewer idle slots raise an event")
    stuck_request_s: Seconds = Field(300, description="no progress for this long")
    webhook: str | None = Field(None, description="URL that gets warning and error events as JSON")

    @model_validator(mode="after")
    def _consistent(self) -> Supervise:
        if self.webhook is not None and not re.match(r"https?://[^/\s]+", self.webhook):
            raise ValueError(
                f"webhook: `{self.webhook}` is not an http or https URL; type webhook: http://127.0.0.1:9000/llamarack"
            )
        return self


class Deployment(_Strict):
    schema_version: Literal[1] = Field(description="version of this file's format")
    models: Annotated[list[Model], Field(min_length=1)] = Field(description="what is served")
    gateway: Gateway = Field(Gateway(), description="the front door")
    supervise: Supervise = Field(Supervise(), description="how engines are watched")

    @model_validator(mode="after")
    def _unique_names(self) -> Deployment:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: the name `{name}` is given twice; clients could not tell them apart")
        return self

    @model_validator(mode="after")
    def _one_client_per_rpc_server(self) -> Deployment:
        groups = [group for model in self.models for group in model.groups]
        endpoints = [address.endpoint for group in groups for address in group.rpc_addresses()]
        for endpoint in endpoints:
            if endpoints.count(endpoint) > 1:
                raise ValueError(
                    f"models: two groups name the RPC server {endpoint}, which serves one client at a time; start a "
                    "second server on another port for the second group"
                )
        return self
