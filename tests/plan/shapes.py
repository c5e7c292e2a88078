"""Models and machines that the tests of the plan share."""

from llamarack.hardware.machine import Card, Host, Link, LinkKind, Machine
from llamarack.plan.reference import LLAMA2, Dimensions
from llamarack.units import GIB, MIB

LLAMA3_8B = Dimensions(
    name="llama-3-8b", layers=32, hidden_size=4096, feed_forward_size=14336, attention_heads=32, kv_heads=8,
    vocab_size=128256, context_train_tokens=8192,
)  # fmt: skip
SMOLLM2 = Dimensions(
    name="smollm2-135m", layers=30, hidden_size=576, feed_forward_size=1536, attention_heads=9, kv_heads=3,
    head_size=64, vocab_size=49152, context_train_tokens=8192, tied_embeddings=True,
)  # fmt: skip
LLAMA2_7B, LLAMA2_13B, LLAMA2_70B = LLAMA2["7B"], LLAMA2["13B"], LLAMA2["70B"]


def host(memory_bytes: int = 64 * GIB, cores: int = 16) -> Host:
    return Host(
        processor=None,
        cores_usable=cores,
        instruction_sets=("avx2",),
        memory_total_bytes=memory_bytes,
        memory_available_bytes=memory_bytes,
    )


def card(index: int, name: str, memory_mib: int, **more) -> Card:
    return Card(
        index=index,
        uuid=f"GPU-{index}",
        vendor="nvidia",
        name=name,
        memory_total_bytes=memory_mib * MIB,
        memory_free_bytes=more.pop("free_mib", memory_mib) * MIB,
        **more,
    )


def machine(*cards: Card, memory_bytes: int = 512 * GIB, driver: str | None = "580.159") -> Machine:
    return Machine(host=host(memory_bytes), cards=cards, driver_version=driver)


def h200(index: int = 0) -> Card:
    return card(index, "NVIDIA H200", 143771)


def linked(cards: list[Card], kind: LinkKind) -> list[Card]:
    from dataclasses import replace

    return [
        replace(one, links=tuple(Link(peer_index=other.index, kind=kind) for other in cards if other is not one))
        for one in cards
    ]
