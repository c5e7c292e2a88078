"""Why do two sides differ? Names a cause from what both were asked; pure.

1. Do they read texts as the same tokens? If not: the tokenizer (plain text differs), the begin-of-sequence policy
   (only with special tokens) or the chat template (only a rendered question differs).
2. Does a run of one repeated token differ? There all values are equal, so attention's weights cannot matter: queries,
   keys and positions are out, and what is left is embedding, values, output projection, feed-forward, head.
3. Otherwise the fault lies in attention: in positions where neighbours still agree (a wrong rotary base turns little
   over one token and much over many), else in its heads.
4. Files that both lie on this machine are compared too (`weights`), which names tensor and place.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from llamarack.judge.collect import Probes
from llamarack.judge.forced import truncated_kl

# Measured with SmolLM2-135M on a processor, in nats: docs/verify-and-compare.md. After 2 to 4 tokens a sound copy in
# another quantisation is off by under 0.01, a wrong rotary base by 0.005, a swapped head by 0.13.
_NEIGHBOURS_AGREE = 0.015
# A repeated token leaves a sound copy at 0.002, a rotary or head fault at 0.002, half a zeroed matrix at 0.46.
_UNIFORM_DIFFERS = 0.02
_UNIFORM_SHARE = 0.2
# A wrong rotary base grows with distance: after 16 to 64 tokens 2.3 to 6.7 times as much as after 2 to 4, and 5 to 28
# times as much as after a repeated token. Rounding does not: 1.8 and 0.3 times (vLLM in bfloat16, one rank and three).
_GROWS = 2.0
_SHORT, _LONG = (2, 4), (16, 32, 64)


class CauseCode(StrEnum):
    TOKENIZER = "tokenizer"
    BOS = "bos_policy"
    CHAT_TEMPLATE = "chat_template"
    ROTARY = "rotary_positions"
    ATTENTION_HEADS = "attention_heads"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """`evidence`: what was seen, with numbers. `fix`: what to look at or type."""

    code: CauseCode
    message: str
    evidence: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Mean divergence of next-token distributions, in nats, by what the prefix was. None: not asked."""

    uniform: float | None
    alone: float | None
    short: float | None
    long: float | None


def reading_causes(reference: Probes, candidate: Probes) -> tuple[Cause, ...]:
    """Step 1: what the candidate reads otherwise."""
    plain = [
        (a.text, a.plain_ids, b.plain_ids)
        for a, b in zip(reference.texts, candidate.texts, strict=True)
        if a.plain_ids is not None and b.plain_ids is not None
    ]
    wrong = [one for one in plain if one[1] != one[2]]
    if wrong:
        text, ours, theirs = wrong[0]
        place = _first_difference(ours, theirs)
        return (
            Cause(
                code=CauseCode.TOKENIZER,
                message="the candidate's tokenizer is not the reference's",
                evidence=f"{len(wrong)} of {len(plain)} texts become other tokens; `{text}` from token {place} on: "
                f"{_shown(ours, place)} against {_shown(theirs, place)}",
                fix="compare tokenizer files and their hashes: llamarack check FILE; take the tokenizer that came "
                "with the weights",
            ),
        )
    special = [
        (a.text, a.special_ids, b.special_ids)
        for a, b in zip(reference.texts, candidate.texts, strict=True)
        if a.special_ids is not None and b.special_ids is not None and a.special_ids != b.special_ids
    ]
    causes = []
    if special:
        text, ours, theirs = special[0]
        causes.append(
            Cause(
                code=CauseCode.BOS,
                message="the two sides add different special tokens to a prompt",
                evidence=f"`{text}` begins with {_shown(ours, 0)} against {_shown(theirs, 0)}",
                fix="compare add_bos_token in tokenizer_config.json with tokenizer.ggml.add_bos_token of the GGUF",
            )
        )
    rendered = (reference.template_ids, candidate.template_ids)
    if None not in rendered and rendered[0] != rendered[1]:
        causes.append(_template_cause(reference, candidate))
    return tuple(causes)


def _template_cause(reference: Probes, candidate: Probes) -> Cause:
    ours, theirs = reference.template_text, candidate.template_text
    if ours is not None and theirs is not None and ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        start = max(0, place - 10)
        evidence = f"`Hello` is rendered as {ours[start : start + 60]!r} against {theirs[start : start + 60]!r}"
    else:
        ids, other = reference.template_ids or (), candidate.template_ids or ()
        place = _first_difference(ids, other)
        evidence = f"`Hello` becomes other tokens from {place} on: {_shown(ids, place)} against {_shown(other, place)}"
    return Cause(
        code=CauseCode.CHAT_TEMPLATE,
        message="the candidate writes questions in another chat template",
        evidence=evidence,
        fix="set models[].chat_template to the reference's, or leave it out for the model's own",
    )


def shape_of(reference: Probes, candidate: Probes) -> Shape:
    """Over the prefixes that both were asked."""
    theirs = {(one.kind, one.ids): one.position for one in candidate.next_tokens}
    pairs = [
        (one.kind, len(one.ids), truncated_kl(one.position, theirs[one.kind, one.ids])[0])
        for one in reference.next_tokens
        if (one.kind, one.ids) in theirs
    ]

    def mean(kind: str, lengths: Sequence[int] | None) -> float | None:
        chosen = [kl for k, n, kl in pairs if k == kind and (lengths is None or n in lengths)]
        return statistics.fmean(chosen) if chosen else None

    return Shape(
        uniform=mean("uniform", None),
        alone=mean("prefix", (1,)),
        short=mean("prefix", _SHORT),
        long=mean("prefix", _LONG),
    )


def weights_cause(shape: Shape) -> Cause | None:
    """Steps 2 and 3, for sides that are known to differ by more than a quantisation would. None: no pattern."""
    if shape.uniform is None or shape.short is None or shape.long is None or shape.long <= 0:
        return None
    seen = (
        f"next tokens part by {shape.uniform:.4f} nats after one repeated token, {shape.alone or 0:.4f} after one "
        f"token, {shape.short:.4f} after 2 to 4, {shape.long:.4f} after 16 to 64"
    )
    if shape.uniform >= max(_UNIFORM_DIFFERS, _UNIFORM_SHARE * shape.long):
        return Cause(
            code=CauseCode.WEIGHTS,
            message="weights outside of attention's queries and keys differ: values, output projection, feed-forward, "
            "embedding or head",
            evidence=f"{seen}; a repeated token leaves attention no choice, and still they part",
            fix="compare the files' checksums with their source and copy them again; on several devices: the split",
        )
    if shape.short <= _NEIGHBOURS_AGREE:
        if shape.long < _GROWS * max(shape.short, shape.uniform):
            return None
        return Cause(
            code=CauseCode.ROTARY,
            message="positions differ: the rotary base or its scaling is not the reference's",
            evidence=f"{seen}; the error grows with distance and is absent where positions cannot matter",
            fix="compare rope_theta and rope_scaling in config.json with llama.rope.freq_base of the GGUF, and "
            "engine_args that set them",
        )
    return Cause(
        code=CauseCode.ATTENTION_HEADS,
        message="attention differs: heads in each other's place, or a wrong shard of them",
        evidence=f"{seen}; neighbours part already, but not where attention has no choice",
        fix="compare the files' checksums with their source; on several devices: tensor_parallel and how heads split",
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shown(ids: Sequence[int], start: int) -> str:
    part = list(ids[start : start + 4])
    return f"{part}" if part else "the end"
