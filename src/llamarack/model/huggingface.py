"""What model is in this Hugging Face folder? config.json, safetensors headers and tokenizer files -> ModelSpec.

Field names are those of transformers' LlamaConfig. Dimensions in config.json are held against the tensors' shapes: an
engine would stop at the first that differs, minutes into its load.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarack.errors import ModelError
from llamarack.model import quantization
from llamarack.model.foreign import foreign_folder
from llamarack.model.json_file import read_object
from llamarack.model.safetensors import INDEX_NAME, read_index, read_tensors, weight_files
from llamarack.model.spec import ModelFormat, ModelSpec, Quantization, Tensor
from llamarack.model.tokenizer_files import read_tokenizer

MAX_LAYERS = 1024
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_K_PROJECTION = "model.layers.0.self_attn.k_proj.weight"
_FLOAT_METHODS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def read_huggingface(folder: Path) -> ModelSpec:
    """Raises ModelError, or OSError."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise foreign_folder(folder)
    config = _Config(config_file, read_object(config_file))
    files = weight_files(folder)
    tensors = _read_all(folder, files)
    tokenizer = read_tokenizer(folder, config.values)
    layers = config.integer("num_hidden_layers", bound=MAX_LAYERS)
    hidden_size = config.integer("hidden_size")
    vocab_size = _embedding_rows(config, tensors, hidden_size)
    heads = config.integer("num_attention_heads", bound=hidden_size)
    head_size = config.integer("head_dim", default=hidden_size // heads)
    kv_heads = _kv_heads(config, tensors, head_size, bound=heads)
    tied = config.values.get("tie_word_embeddings") is True
    if not tied and _HEAD not in tensors:
        raise config.error("tie_word_embeddings", f"is not true, but the weights have no `{_HEAD}`")
    _check_layers(config, layers, tensors)
    context = config.values.get("max_position_embeddings")
    return ModelSpec(
        path=folder,
        files=files,
        format=ModelFormat.SAFETENSORS,
        architecture=_text(config.values.get("model_type")) or "unknown",
        name=_text(config.values.get("_name_or_path")) or folder.resolve().name,
        layers=layers,
        hidden_size=hidden_size,
        feed_forward_sizes=(config.integer("intermediate_size"),) * layers,
        attention_heads=(heads,) * layers,
        kv_heads=(kv_heads,) * layers,
        head_size_k=head_size,
        head_size_v=head_size,
        vocab_size=vocab_size,
        context_train_tokens=context if type(context) is int and context > 0 else None,
        tied_embeddings=tied,
        quantization=_quantization(folder, config, tensors),
        tensors=tuple(tensors.values()),
        tokenizer=tokenizer.identity,
        chat_template=tokenizer.chat_template,
        rope_freq_base=_rope_freq_base(config.values),
    )


@dataclass(frozen=True, slots=True)
class _Config:
    path: Path
    values: dict[str, Any]

    def integer(self, name: str, *, default: int | None = None, bound: int = 2**31 - 1) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= bound:
            seen = "missing" if value is None else f"`{str(value)[:60]}`"
            raise self.error(name, f"is {seen}, not a whole number from 1 to {bound:,}")
        return value

    def error(self, name: str, what: str, hint: str | None = None) -> ModelError:
        hint = hint or "restore the model's own config.json"
        return ModelError(f"`{self.path}`: `{name}` {what}", hint=hint)


def _read_all(folder: Path, files: tuple[Path, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    in_file: dict[str, str] = {}
    for file in files:
        for tensor in read_tensors(file):
            if tensor.name in tensors:
                raise ModelError(
                    f"`{file}` and `{in_file[tensor.name]}` both hold tensor `{tensor.name}`",
                    hint="leave one model in the folder",
                )
            tensors[tensor.name], in_file[tensor.name] = tensor, file.name
    index = folder / INDEX_NAME
    if index.is_file():
        wrong = [name for name, file in read_index(index).items() if in_file.get(name) != file]
        if wrong:
            raise ModelError(
                f"`{index}` says {len(wrong)} tensors are where they are not, the first `{wrong[0]}`",
                hint="shards of different models are mixed: copy or download the folder again",
            )
    return tensors


def _kv_heads(config: _Config, tensors: Mapping[str, Tensor], head_size: int, *, bound: int) -> int:
    """transformers takes a missing `num_key_value_heads` for `num_attention_heads`. That default is not taken here:
    where a hand-edited or half-converted config lost the key, the cache would be planned up to 8 times too large and
    the engine would fail; where the default is right, one line in config.json says so for ever.
    """
    projection = tensors.get(_K_PROJECTION)
    rows = projection.shape[0] if projection and len(projection.shape) == 2 else None
    if config.values.get("num_key_value_heads") is None:
        in_weights = rows // head_size if rows and rows % head_size == 0 else None
        line = f'"num_key_value_heads": {in_weights or config.values.get("num_attention_heads")}'
        why = "which is what the weights hold" if in_weights else "if every head has its own keys and values"
        raise config.error("num_key_value_heads", "is missing", hint=f"add the line `{line}`, {why}")
    kv_heads = config.integer("num_key_value_heads", bound=bound)
    if rows is not None and rows != kv_heads * head_size:
        raise config.error(
            "num_key_value_heads", f"is {kv_heads}, but `{_K_PROJECTION}` has {rows} rows, not {kv_heads} x {head_size}"
        )
    return kv_heads


def _check_layers(config: _Config, layers: int, tensors: Mapping[str, Tensor]) -> None:
    found = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if found != set(range(layers)):
        missing = sorted(set(range(layers)) - found)
        what = f"no tensors of layer {missing[0]}" if missing else f"tensors of layer {max(found)}"
        raise config.error("num_hidden_layers", f"is {layers}, but the weights have {what}")


def _embedding_rows(config: _Config, tensors: Mapping[str, Tensor], hidden_size: int) -> int:
    embedding = tensors.get(_EMBEDDING)
    if embedding is None:
        raise ModelError(
            f"`{config.path.parent}` has no `{_EMBEDDING}`: it is an adapter, or not a language model",
            hint="name the folder of the whole model; merge an adapter into it first",
        )
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise config.error("hidden_size", f"is {hidden_size}, but `{_EMBEDDING}` has the shape {embedding.shape}")
    vocab_size = config.integer("vocab_size")
    if vocab_size != embedding.shape[0]:
        raise config.error("vocab_size", f"is {vocab_size:,}, but `{_EMBEDDING}` has {embedding.shape[0]:,} rows")
    return embedding.shape[0]


def _quantization(folder: Path, config: _Config, tensors: Mapping[str, Tensor]) -> Quantization:
    described = config.values.get("quantization_config")
    if isinstance(described, dict):
        return quantization.from_config(described, str(config.path))
    # Checkpoints made before transformers 4.32 keep the same keys in a file of their own, without the method's name.
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            old = read_object(folder / name)
            return quantization.from_config({**old, "quant_method": method}, str(folder / name))
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) > 1]
    bytes_of_type: Counter[str] = Counter()
    for tensor in matrices:
        bytes_of_type[tensor.type] += tensor.size_bytes
    main_type = bytes_of_type.most_common(1)[0][0]
    method = _FLOAT_METHODS.get(main_type, "")
    if not method:
        raise config.error("quantization_config", f"is missing, but most weights are {main_type}")
    elements = sum(math.prod(tensor.shape) for tensor in matrices)
    bits = 8 * sum(tensor.size_bytes for tensor in matrices) / elements if elements else None
    return Quantization(method=method, label=main_type, bits=bits)


def _rope_freq_base(config: Mapping[str, Any]) -> float | None:
    parameters = config.get("rope_parameters")  # transformers 5 moved it there
    value = config.get("rope_theta", parameters.get("rope_theta") if isinstance(parameters, dict) else None)
    return float(value) if type(value) in (int, float) and 0 < value < 1e30 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
