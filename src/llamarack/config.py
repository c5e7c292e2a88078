"""The deployment file: strict models, where each value came from, errors that name the key and what to type.

`load(path)` reads YAML; nothing is downloaded and no engine is asked. `json_schema()` is `llamarack schema`.
"""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from llamarack.errors import ConfigError
from llamarack.rpc_address import RpcAddress, parse_rpc_address

SCHEMA_VERSION = 1
Engine = Literal["llamacpp", "vllm", "transformers"]
KvDtype = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "auto", "fp8", "fp8_e5m2"]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
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
    kv_cache_bytes: Literal["auto"] | Count = Field("auto", description="vllm: KV cache per card; wins over fraction")
    gpu_memory_fraction: Fraction = Field(0.90, description="vllm: share of each card's total memory")
    threads: Literal["auto"] | Count = Field("auto", description="CPU threads; auto: usable cores / replicas")


class Group(_Strict):
    """Replicas that are alike."""

    engine: Engine = Field("llamacpp", description="which engine runs the replicas")
    path: FilePath | None = Field(None, description="model for this engine; default: the model's")
    replicas: Count = Field(1, description="full copies of the model; requests are spread over them")
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
        description="the id clients send"
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
    access_log: Literal["text", "json", "off"] = Field("text", description="one line a request in the gateway's log")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDeployment:
    """A validated file. `lines`: key path such as `models[0].path` -> line in `source`; keys not there are defaults."""

    deployment: Deployment
    source: Path | None
    lines: dict[str, int]

    def origin(self, key: str) -> str:
        """`rack.yaml:7` or `default`."""
        if key not in self.lines:
            return "default"
        return f"{self.source.name if self.source else 'input'}:{self.lines[key]}"


class _PositionLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, which YAML parsers silently let win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is not a word; write it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: Path) -> LoadedDeployment:
    """Read and validate a deployment file; relative paths in it are relative to its folder.

    Raises ConfigError naming the key, the line, the given value and what to type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"deployment file `{path}` is not there", hint="llamarack plan MODEL -o rack.yaml writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deployment file `{path}` cannot be read: {_reason(error)}") from error
    loaded = parse(text, source=path)
    _require_paths(loaded)
    return loaded


def parse(text: str, *, source: Path | None = None) -> LoadedDeployment:
    """The same from text, without looking whether the paths in it exist."""
    where = str(source) if source else "deployment"
    loader = _PositionLoader(text)
    try:
        node = loader.get_single_node()
        value = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"`{where}`{line}: {error.problem}", hint="check the indentation and quotes there") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`{where}` is not YAML: {error}") from error
    finally:
        loader.dispose()
    if not isinstance(value, dict):
        raise ConfigError(
            f"`{where}` holds no mapping", hint="start with `schema_version: 1` and `models:`; see llamarack schema"
        )
    value.setdefault("schema_version", SCHEMA_VERSION)
    version = value["schema_version"]
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"schema_version: this llamarack reads version {SCHEMA_VERSION}, `{version}` given",
            hint="install the llamarack that wrote the file, or change the version after reading CHANGELOG.md",
        )
    lines = dict(_key_lines(node, ""))
    try:
        deployment = Deployment.model_validate(value)
    except ValidationError as error:
        raise _explain(error, where, lines) from None
    return LoadedDeployment(
        deployment=_resolve_paths(deployment, source.parent if source else None), source=source, lines=lines
    )


def json_schema() -> dict[str, Any]:
    """JSON schema of the deployment file, for editors and CI."""
    schema = Deployment.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    model = schema["$defs"]["Model"]
    group = schema["$defs"]["Group"]
    for key, field in group["properties"].items():
        model["properties"].setdefault(key, field)  # one group may be written flat
    model["required"] = [key for key in model["required"] if key != "groups"]
    return schema


def to_yaml(deployment: Deployment) -> str:
    """The file again, without what equals the defaults; `load` reads it back to an equal Deployment."""
    data = deployment.model_dump(mode="json", exclude_defaults=True)
    for model in data["models"]:
        if len(model["groups"]) == 1 and not set(model["groups"][0]) & set(Model.model_fields):
            model.update(model.pop("groups")[0])
    return yaml.safe_dump({"schema_version": SCHEMA_VERSION, **data}, sort_keys=False, allow_unicode=True)


def _key_lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            yield key, key_node.start_mark.line + 1
            yield from _key_lines(value_node, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{prefix}[{index}]", item.start_mark.line + 1
            yield from _key_lines(item, f"{prefix}[{index}]")


def _explain(error: ValidationError, where: str, lines: dict[str, int]) -> ConfigError:
    """One ConfigError for the first fault; further faults are counted in the hint."""
    faults = error.errors()
    first = min(faults, key=lambda fault: len(fault["loc"]) == 0)
    key = _as_written(_key_of(first["loc"]), lines)
    place = _nearest_line(key, lines)
    given = first.get("input")
    hint: str | None
    if first["type"] == "extra_forbidden":
        message = f"`{key}` is not a known key"
        hint = _nearest_key(first["loc"])
    elif first["type"] == "missing":
        message, hint = f"`{key}` is missing", f"add `{key.rsplit('.', 1)[-1]}:`; llamarack schema describes it"
    elif first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        name, _, rest = text.partition(": ")
        problem, _, advice = rest.partition("; ")
        message = f"`{_join(key, name)}`: {problem}"
        hint = advice or None
        place = _nearest_line(_join(key, name), lines) or place
    else:
        shown = json.dumps(given, default=str, ensure_ascii=False)
        shown = shown if len(shown) < 80 else shown[:77] + "..."
        message = f"`{key}`: {_sentence(faults, _key_of(first['loc']))}, {shown} given"
        hint = _expected(first["loc"])
    line = f" line {place}" if place else ""
    others = len({_key_of(fault["loc"]) for fault in faults}) - 1
    if others:
        hint = f"{hint or ''}{'; ' if hint else ''}{others} more fault{'s' if others > 1 else ''} after this one"
    return ConfigError(f"{where}{line}: {message}", hint=hint)


def _sentence(faults: list[Any], key: str) -> str:
    """What the alternatives of a field would have accepted, in words."""
    texts = [str(fault["msg"]) for fault in faults if _key_of(fault["loc"]) == key]
    bare = [text.removeprefix("Input ") for text in texts]
    return " or ".join(dict.fromkeys(text[:1].lower() + text[1:] for text in bare))


_UNION_TAGS = ("literal[", "constrained-", "function-", "int", "float", "str", "bool", "list[", "nullable")


def _key_of(location: tuple[int | str, ...]) -> str:
    """`models[0].limits.sequences` without pydantic's names of union members."""
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif not part.startswith(_UNION_TAGS) or part in Deployment.model_fields:
            key = _join(key, part)
    return key


def _as_written(key: str, lines: dict[str, int]) -> str:
    """A flat group is validated as `groups[0]`, which the user never wrote."""
    model, found, rest = key.partition(".groups[0]")
    return model + rest if found and f"{model}.groups" not in lines else key


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _nearest_line(key: str, lines: dict[str, int]) -> int | None:
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0] if "." in key else key.rpartition("[")[0]
    return None


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Deployment
    for part in location:
        if isinstance(part, int) or model is None or part not in model.model_fields:
            continue
        model = _inner_model(model.model_fields[part].annotation)
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner_model, typing.get_args(annotation))), None)


def _nearest_key(location: tuple[int | str, ...]) -> str:
    model = _model_at(location[:-1]) or Deployment
    known = set(model.model_fields) | (set(Group.model_fields) if model is Model else set())
    close = difflib.get_close_matches(str(location[-1]), sorted(known), n=1, cutoff=0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return "known keys here: " + ", ".join(sorted(known))


def _expected(location: tuple[int | str, ...]) -> str | None:
    model: type[BaseModel] | None = Deployment
    description = None
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            description = model.model_fields[part].description or description
            model = _inner_model(model.model_fields[part].annotation)
    return description


def _resolve_paths(deployment: Deployment, base: Path | None) -> Deployment:
    if base is None:
        return deployment

    def resolve(value: Path | None) -> Path | None:
        return None if value is None else (base / value.expanduser()).absolute()

    models = [
        model.model_copy(
            update={
                "path": resolve(model.path),
                "tokenizer": resolve(model.tokenizer),
                "fallbacks": [resolve(path) for path in model.fallbacks],
                "groups": [
                    group.model_copy(
                        update={key: resolve(getattr(group, key)) for key in ("path", "engine_python", "engine_binary")}
                    )
                    for group in model.groups
                ],
            }
        )
        for model in deployment.models
    ]
    gateway = deployment.gateway.model_copy(
        update={key: resolve(getattr(deployment.gateway, key)) for key in ("api_keys_file", "tls_cert", "tls_key")}
    )
    return deployment.model_copy(update={"models": models, "gateway": gateway})


def _require_paths(loaded: LoadedDeployment) -> None:
    for index, model in enumerate(loaded.deployment.models):
        wanted = [(f"models[{index}].path", model.path), (f"models[{index}].tokenizer", model.tokenizer)]
        wanted += [(f"models[{index}].fallbacks[{i}]", path) for i, path in enumerate(model.fallbacks)]
        is_flat = f"models[{index}].groups" not in loaded.lines
        for number, group in enumerate(model.groups):
            prefix = f"models[{index}]" if is_flat else f"models[{index}].groups[{number}]"
            wanted += [(f"{prefix}.{key}", getattr(group, key)) for key in ("path", "engine_python", "engine_binary")]
        for key, path in wanted:
            if path is not None and not path.exists():
                raise _missing_path(loaded, key, path)
    for name in ("api_keys_file", "tls_cert", "tls_key"):
        path = getattr(loaded.deployment.gateway, name)
        if path is not None and not path.exists():
            raise _missing_path(loaded, f"gateway.{name}", path)


def _missing_path(loaded: LoadedDeployment, key: str, path: Path) -> ConfigError:
    parent = path.parent
    hint = f"folder `{parent}` is not there either"
    if parent.is_dir():
        close = difflib.get_close_matches(path.name, sorted(item.name for item in parent.iterdir())[:2000], n=1)
        hint = f"did you mean `{parent / close[0]}`?" if close else f"ls {parent}"
    line = loaded.lines.get(key)
    where = f"{loaded.source} line {line}: " if line else ""
    return ConfigError(f"{where}`{key}`: `{path}` is not there", hint=hint)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"
