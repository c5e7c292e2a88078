"""Does the tokenizer belong to these weights? Findings, each with what to do; nothing is raised.

A model answers garbage, or without end, when its ids mean other pieces than in training. LLaMA-1 and LLaMA-2 share one
tokenizer, so the mix-ups that happen are others: LLaMA-3, Mistral, CodeLlama or Chinese-LLaMA files, added tokens
without rows, special ids of old conversions, two tokenizer files that disagree. An unknown tokenizer is a note.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from llamarack.hardware.finding import Finding, Severity
from llamarack.model.spec import ModelSpec, TokenizerIdentity
from llamarack.model.tokenizer import Family, families, family_of

_MARK = re.compile(r"<\|[a-zA-Z0-9_]{1,40}\|>")
_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
# Rows are padded for the hardware's sake, to multiples of 64 up to 512 in published models.
MAX_PADDING_ROWS = 512
_GARBAGE = "ids then mean other pieces than in training: answers are garbage or do not end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is judged. `pieces`: all of them. `second`: pieces of tokenizer.model where `first` is tokenizer.json."""

    spec: ModelSpec
    tokenizer: TokenizerIdentity
    subject: str  # the file or folder the tokenizer came from
    is_gguf: bool  # whether that is a GGUF file
    pieces: Container[str]
    chat_template: str | None
    first: tuple[str, ...] = ()
    second: tuple[str, ...] | None = None


def judge(evidence: Evidence) -> tuple[Finding, ...]:
    """Errors first. Pure."""
    if not evidence.tokenizer.vocab_size:
        return (
            _finding(
                "tokenizer_missing", Severity.ERROR, evidence, seen="no tokenizer",
                why="an engine cannot turn text into ids without one",
                fix="copy tokenizer.json and tokenizer_config.json of the model beside its weights",
            ),
        )  # fmt: skip
    checks = (_check_size, _check_family, _check_special_ids, _check_policy, _check_pre, _check_files, _check_template)
    findings = [finding for check in checks for finding in check(evidence)]
    return tuple(sorted(findings, key=lambda finding: _RANK[finding.severity]))


def _finding(code: str, severity: Severity, evidence: Evidence, *, seen: str, why: str, fix: str) -> Finding:
    return Finding(code=code, severity=severity, subject=evidence.subject, seen=seen, why=why, fix=fix)


def weights_family(spec: ModelSpec) -> Family | None:
    """Whose weights these are, told by rows and shape alone; None where that fits none or several."""
    shape = (spec.hidden_size, max(spec.feed_forward_sizes), spec.layers)
    sized = [family for family in families() if family.vocab_size == spec.vocab_size]
    shaped = [family for family in sized if shape in family.shapes]
    candidates = shaped or sized
    return candidates[0] if len(candidates) == 1 else None


def tokenizer_family(tokenizer: TokenizerIdentity) -> Family | None:
    """By its hash, else by its size where only one family has that size."""
    known = family_of(tokenizer.sha256, () if tokenizer.sha256 else (value for _, value in tokenizer.file_sha256))
    sized = [family for family in families() if family.vocab_size == tokenizer.vocab_size and family.sha256 is None]
    return known or (sized[0] if len(sized) == 1 else None)


def _check_size(evidence: Evidence) -> Iterator[Finding]:
    tokens, rows = evidence.tokenizer.vocab_size or 0, evidence.spec.vocab_size
    if tokens > rows:
        added = tokens - rows
        extra = f"{added} token{'s' if added > 1 else ''} over" + (", an added pad token perhaps" if added < 9 else "")
        yield _finding(
            "tokenizer_beyond_embedding", Severity.ERROR, evidence,
            seen=f"{tokens:,} tokens{_named(evidence)}, the embedding has {rows:,} rows ({extra})",
            why="an id without a row reads foreign memory or stops the engine",
            fix="use the tokenizer files that came with these weights"
            + (", or resize the embedding when you add tokens" if added < 9 else ""),
        )  # fmt: skip
    elif rows - tokens > MAX_PADDING_ROWS or (tokens < rows and weights_family(evidence.spec)):
        family = weights_family(evidence.spec)
        yield _finding(
            "tokenizer_smaller_than_embedding", Severity.ERROR if family else Severity.WARNING, evidence,
            seen=f"{tokens:,} tokens{_named(evidence)}, the embedding has {rows:,} rows"
            + (f", as {family.name} has" if family else ""),
            why=_GARBAGE,
            fix=f"use the tokenizer files of {family.name if family else 'these weights'}",
        )  # fmt: skip


def _check_family(evidence: Evidence) -> Iterator[Finding]:
    of_tokenizer, of_weights = tokenizer_family(evidence.tokenizer), weights_family(evidence.spec)
    if of_tokenizer is None:
        yield _finding(
            "tokenizer_unknown", Severity.NOTE, evidence,
            seen=f"sha256 {(evidence.tokenizer.sha256 or 'unknown')[:16]}, {evidence.tokenizer.vocab_size:,} tokens",
            why="it is not one of the tokenizers known by name, so only sizes and ids were checked",
            fix="nothing, if the model is a fine-tuned one or not of the LLaMA families",
        )  # fmt: skip
    elif of_weights and of_weights != of_tokenizer and of_weights.vocab_size == of_tokenizer.vocab_size:
        yield _finding(
            "tokenizer_other_family", Severity.ERROR, evidence,
            seen=f"the tokenizer of {of_tokenizer.name}; the weights have the shape of {of_weights.name}",
            why=f"both have {of_weights.vocab_size:,} tokens in another order: {_GARBAGE}",
            fix=f"use the tokenizer files of {of_weights.name}",
        )  # fmt: skip
    if of_tokenizer and evidence.tokenizer.kind not in (None, of_tokenizer.kind):
        yield _finding(
            "tokenizer_wrong_kind", Severity.ERROR, evidence,
            seen=f"kind `{evidence.tokenizer.kind}`; {of_tokenizer.name} has `{of_tokenizer.kind}`",
            why="the pieces are right, text is cut into them by the wrong rules",
            fix="convert the model again with a current `convert_hf_to_gguf.py`",
        )  # fmt: skip


def _check_special_ids(evidence: Evidence) -> Iterator[Finding]:
    tokenizer, family = evidence.tokenizer, tokenizer_family(evidence.tokenizer)
    for name in ("bos", "eos", "pad", "unk"):
        value = getattr(tokenizer, f"{name}_id")
        if value is not None and value >= evidence.spec.vocab_size:
            yield _finding(
                f"{name}_beyond_embedding", Severity.ERROR, evidence,
                seen=f"{name} id {value:,}, the embedding has {evidence.spec.vocab_size:,} rows",
                why="an id without a row reads foreign memory or stops the engine",
                fix="set it to a token of the tokenizer" + ("; a pad id may be the eos id" if name == "pad" else ""),
            )  # fmt: skip
    if family is None:
        return
    severity = Severity.ERROR if family.sha256 == tokenizer.sha256 else Severity.WARNING
    if tokenizer.bos_id is not None and tokenizer.bos_id != family.bos_id:
        yield _finding(
            "bos_wrong", severity, evidence, seen=f"bos id {tokenizer.bos_id}, {family.name} has {family.bos_id}",
            why="every prompt begins with a token the model was not trained to begin with",
            fix=_fix_key(evidence, "bos", family.bos_id),
        )  # fmt: skip
    if tokenizer.eos_id is not None and tokenizer.eos_id not in family.eos_ids:
        yield _finding(
            "eos_wrong", severity, evidence,
            seen=f"eos id {tokenizer.eos_id}, {family.name} has {' or '.join(map(str, family.eos_ids))}",
            why="the model ends with a token that nobody takes for an end: answers run to the limit",
            fix=_fix_key(evidence, "eos", family.eos_ids[-1]),
        )  # fmt: skip


def _check_policy(evidence: Evidence) -> Iterator[Finding]:
    tokenizer, family = evidence.tokenizer, tokenizer_family(evidence.tokenizer)
    if family and family.add_bos and tokenizer.add_bos is False:
        yield _finding(
            "add_bos_wrong", Severity.WARNING, evidence,
            seen=f"add_bos is false; {family.name} was trained with a bos token",
            why="answers get worse, in older conversions to the point of garbage; a template that writes the bos "
            "itself makes up for it in chat, not in completions",
            fix="`gguf-set-metadata FILE tokenizer.ggml.add_bos_token true`"
            if evidence.is_gguf
            else 'set `"add_bos_token": true` in tokenizer_config.json',
        )  # fmt: skip
    if tokenizer.add_eos is True:
        yield _finding(
            "add_eos_wrong", Severity.WARNING, evidence, seen="add_eos is true",
            why="every prompt ends with an end mark: a chat model then often answers nothing",
            fix="set add_eos_token to false",
        )  # fmt: skip


def _check_pre(evidence: Evidence) -> Iterator[Finding]:
    """`tokenizer.ggml.pre` chooses how byte-level BPE splits text; llama.cpp ignores it for other kinds."""
    tokenizer, family = evidence.tokenizer, tokenizer_family(evidence.tokenizer)
    if not evidence.is_gguf or tokenizer.kind != "gpt2":
        return
    if tokenizer.pre in (None, "default") or (family and tokenizer.pre not in family.pre):
        right = f"`{family.pre[0]}`" if family else "the one of its family"
        yield _finding(
            "pre_wrong", Severity.ERROR if tokenizer.pre not in (None, "default") else Severity.WARNING, evidence,
            seen=f"tokenizer.ggml.pre is {f'`{tokenizer.pre}`' if tokenizer.pre else 'missing'}, not {right}",
            why="numbers, punctuation and Chinese text are cut into other pieces than in training (conversions before "
            "May 2024 lack the key)",
            fix=f"`gguf-new-metadata --pre-tokenizer {family.pre[0] if family else 'NAME'} IN.gguf OUT.gguf`",
        )  # fmt: skip


def _check_files(evidence: Evidence) -> Iterator[Finding]:
    first, second = evidence.first, evidence.second
    if second is None or not first or first == second:
        return
    differing = next(
        (number for number, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None
    )
    if differing is None and len(first) > len(second):
        yield _finding(
            "tokenizer_files_extended", Severity.NOTE, evidence,
            seen=f"tokenizer.json adds {len(first) - len(second)} tokens to the {len(second):,} of tokenizer.model",
            why="a converter that reads tokenizer.model needs added_tokens.json beside it",
            fix="nothing, if the engine reads tokenizer.json",
        )  # fmt: skip
        return
    at = (
        f"id {differing:,} is `{first[differing]}` and `{second[differing]}`"
        if differing is not None
        else "one is longer"
    )
    yield _finding(
        "tokenizer_files_disagree", Severity.ERROR, evidence,
        seen=f"tokenizer.json ({len(first):,} pieces) and tokenizer.model ({len(second):,}) differ: {at}",
        why="engines and converters read one or the other, so they would not feed the model the same ids",
        fix="copy both files again from the source of the weights, or remove the foreign one",
    )  # fmt: skip


def _check_template(evidence: Evidence) -> Iterator[Finding]:
    template = evidence.chat_template
    if template is None:
        yield _finding(
            "chat_template_missing", Severity.NOTE, evidence, seen="no chat template",
            why="chat requests then get a template that the engine picks; a base model has none",
            fix="for a chat model, name one in the deployment file: `chat_template: llama-2`",
        )  # fmt: skip
        return
    marks = sorted(set(_MARK.findall(template)))
    foreign = [mark for mark in marks if mark not in evidence.pieces]
    if "[INST]" in template and "<|start_header_id|>" in evidence.pieces and "<|start_header_id|>" not in marks:
        foreign = ["[INST]"]
    if foreign:
        yield _finding(
            "chat_template_foreign", Severity.WARNING, evidence,
            seen=f"the template writes {', '.join(f'`{mark}`' for mark in foreign[:4])}, unknown to the tokenizer",
            why="the marks are then spelt out letter by letter: the model does not see where a turn begins or ends",
            fix="name the model's own template in the deployment file: `chat_template: llama-2` or a file",
        )  # fmt: skip


def _named(evidence: Evidence) -> str:
    family = tokenizer_family(evidence.tokenizer)
    if family:
        return f" ({family.name})"
    sized = [family.name for family in families() if family.vocab_size == evidence.tokenizer.vocab_size]
    return f" (as many as {' and '.join(sized)})" if sized else ""


def _fix_key(evidence: Evidence, name: str, value: int) -> str:
    if evidence.is_gguf:
        return f"`gguf-set-metadata FILE tokenizer.ggml.{name}_token_id {value}`, or convert the model again"
    return f"set `{name}_token` in tokenizer_config.json to the piece of id {value}, and the id in config.json"
