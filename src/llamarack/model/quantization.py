"""How are these weights quantised? `quantization_config` of a Hugging Face model -> Quantization.

An unknown method is an error, not a guess: its bytes, its kernels and its shard rules are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from llamarack.errors import ModelError
from llamarack.model.spec import Quantization

_HINT = "use a GPTQ, AWQ, FP8 or compressed-tensors form of the model, or the unquantised one"


def from_config(config: Mapping[str, Any], where: str) -> Quantization:
    """`config`: the `quantization_config` object; `where` is named in errors."""
    method = config.get("quant_method")
    match method:
        case "gptq" | "gptq_marlin":
            return _integer("gptq", config, where)
        case "awq" | "awq_marlin":
            return _integer("awq", config, where)
        case "fp8" | "fbgemm_fp8":
            block = config.get("weight_block_size")
            return Quantization(
                method="fp8",
                label="FP8",
                bits=8,
                group_size=block[1] if _is_block(block) else None,
                activations="fp8",
                detail=f"activations {config.get('activation_scheme', 'dynamic')}"[:60],
            )
        case "compressed-tensors":
            return _compressed_tensors(config, where)
    raise ModelError(f"`{where}`: quantisation method `{method}` is not known"[:300], hint=_HINT)


def _integer(method: str, config: Mapping[str, Any], where: str) -> Quantization:
    bits = _whole(config.get("bits", config.get("w_bit")), (2, 3, 4, 8), f"{method} bits", where)
    group_size = config.get("group_size", config.get("q_group_size", -1))
    if type(group_size) is not int or not (group_size == -1 or 1 <= group_size <= 65_536):
        raise ModelError(f"`{where}`: {method} group_size is `{group_size}`"[:300], hint=_HINT)
    group = f"-{group_size}g" if group_size > 0 else ""
    return Quantization(
        method=method,
        label=f"{method.upper()}-{bits}bit{group}",
        bits=bits,
        group_size=group_size if group_size > 0 else None,
        detail="desc_act" if config.get("desc_act") is True else None,
    )


def _compressed_tensors(config: Mapping[str, Any], where: str) -> Quantization:
    groups = config.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise ModelError(f"`{where}`: compressed-tensors without `config_groups` and their `weights`", hint=_HINT)
    bits = _whole(weights.get("num_bits"), (4, 8), "compressed-tensors num_bits", where)
    inputs = group.get("input_activations")
    activations, activation_bits = None, 16
    if isinstance(inputs, dict):
        activation_bits = _whole(inputs.get("num_bits"), (4, 8), "compressed-tensors activation num_bits", where)
        activations = f"{'fp' if inputs.get('type') == 'float' else 'int'}{activation_bits}"
    kind = "FP" if weights.get("type") == "float" else "INT"
    group_size = weights.get("group_size")
    return Quantization(
        method="compressed-tensors",
        label=f"W{bits}A{activation_bits} ({kind}{bits})",
        bits=bits,
        group_size=group_size if type(group_size) is int and group_size > 0 else None,
        activations=activations,
        detail=config["format"][:60] if isinstance(config.get("format"), str) else None,
    )


def _whole(value: Any, allowed: tuple[int, ...], what: str, where: str) -> int:
    if type(value) is not int or value not in allowed:
        raise ModelError(f"`{where}`: {what} is `{value}`, not one of {allowed}"[:300], hint=_HINT)
    return value


def _is_block(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)
