"""How far a candidate could go: most sequences at its context, longest context at its sequences. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamarack.config import Group
from llamarack.plan.devices import card_of
from llamarack.plan.estimate import Setting, estimate, plan_replica
from llamarack.plan.record import CPU_INDEX, Candidate

_MOST_SEQUENCES = 4096
_MOST_CONTEXT = 1 << 20
_CONTEXT_STEP = 256  # llama.cpp pads contexts to this


def with_limits(setting: Setting, group: Group, candidate: Candidate) -> Candidate:
    """Fill `max_sequences` and `max_context_tokens`; 0 where not even the smallest fits.

    vLLM's follow from its KV cache; llama.cpp's are searched, since every buffer moves with them. A context longer
    than the model was trained for is not offered.
    """
    trained = setting.shape.spec.context_train_tokens or _MOST_CONTEXT
    if candidate.engine == "vllm":
        longest = candidate.max_context_tokens
        return replace(candidate, max_context_tokens=None if longest is None else min(longest, trained))
    cards = tuple(card_of(setting.machine, card.index) for card in candidate.cards if card.index != CPU_INDEX)

    def fits(context_tokens: int, sequences: int) -> bool:
        limits = replace(group.limits, context_tokens=context_tokens, sequences=sequences)
        asked = replace(group, limits=limits)
        if not _share_cards(candidate):
            return not plan_replica(setting, asked, cards, setting.claimed).problems
        hands = tuple(tuple(card_of(setting.machine, index) for index in hand) for hand in candidate.replica_cards)
        return estimate(setting, asked, hands).fits

    steps = largest(lambda count: fits(count * _CONTEXT_STEP, candidate.sequences), max(trained // _CONTEXT_STEP, 1))
    return replace(
        candidate,
        max_sequences=largest(lambda count: fits(candidate.context_tokens, count), _MOST_SEQUENCES),
        max_context_tokens=min(steps * _CONTEXT_STEP, trained),
    )


def _share_cards(candidate: Candidate) -> bool:
    """Whether two replicas stand on one device, so that each has less than is free now."""
    indices = [index for hand in candidate.replica_cards for index in hand]
    return len(set(indices)) < len(indices) or (candidate.replicas > 1 and not indices)


def largest(is_possible: Callable[[int], bool], most: int) -> int:
    """The largest count from 1 to `most` that is possible, 0 if none; what is possible stays so for smaller ones."""
    low, high = 0, 1
    while high <= most and is_possible(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return low
