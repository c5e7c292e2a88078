"""What llama.cpp's CUDA backend holds beside its buffers once it has worked: pools that grow with requests. Pure.

Measured with b11434 on an NVIDIA H200, 30 November 2026 (benchmarks/results/h200_llamacpp.md): 24 starts of LLaMA-2 7B
and 13B, read after the warm-up. Fitted to 7B; on 13B the largest error of a card's total is 0.07 %.
"""

from __future__ import annotations

from llamarack.plan.llamacpp import Settings
from llamarack.plan.shape import ModelShape
from llamarack.units import MIB

# cuBLAS multiplies 16- and 32-bit matrices and keeps a workspace: 103 MiB on 7B, 104 on 13B.
_CUBLAS_BYTES = 103 * MIB
POOL_GROWTH_BYTES = 32 * MIB  # 4 to 10 MiB more were seen after 128 requests at 64 at once
_CUBLAS_TYPES = {"F16", "BF16", "F32"}


def pool_bytes(shape: ModelShape, settings: Settings) -> int:
    """Of one card that holds a part of every kind of layer work."""
    converted = 2 * settings.micro_batch_tokens * shape.feed_forward_size  # a batch's activations in 16 bits
    return converted + _workspace_bytes(shape)


def _workspace_bytes(shape: ModelShape) -> int:
    is_multiplied = any(
        tensor.type in _CUBLAS_TYPES and len(tensor.shape) == 2 and not tensor.name.startswith("token_embd")
        for tensor in shape.spec.tensors
    )
    return _CUBLAS_BYTES if is_multiplied else 0
