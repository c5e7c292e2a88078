"""Does an answer read like an answer? Garbage, loops, leaked token pieces, the wrong script. Pure.

Only gross faults are claimed: a small model repeats itself and slips, and so may its reference; `verify` blames the
candidate only for what the reference does not do.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from llamarack.supervise.warmup import fault_of

# Marks that vocabularies write for a space, a line feed or a byte; in an answer they mean that nobody decoded it.
_RAW_PIECES = re.compile(r"\u2581|\u0120|\u010a|<0x[0-9A-Fa-f]{2}>")
# Marks of templates; in an answer the model speaks the part of the user or of the template itself.
_TEMPLATE_MARKS = re.compile(
    r"<\|im_(?:start|end)\|>|\[/?INST\]|<</?SYS>>|<\|(?:start|end)_header_id\|>|<\|eot_id\|>|</?s>|<\|user\|>"
)
# An answer that was cut at its limit may end inside a character.
_CUT_CHARACTER = re.compile("\ufffd{1,4}$")
_LOOP_COPIES = 4
_LOOP_SHARE = 0.5
_LOOP_LEAST_TOKENS = 24
_LEAST_LETTERS = 12  # fewer say nothing of a language
_LEAST_SHARE = 0.3  # of letters in the language's own script: technical terms stay Latin in any language

_SCRIPTS: dict[str, tuple[str, ...]] = {
    "zh": ("CJK",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "ko": ("HANGUL",),
    "ru": ("CYRILLIC",),
    "ar": ("ARABIC",),
    "he": ("HEBREW",),
    "el": ("GREEK",),
    "hi": ("DEVANAGARI",),
    "th": ("THAI",),
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl"), ("LATIN",)),
}


class Fault(StrEnum):
    GARBAGE = "garbage"
    RAW_PIECES = "raw_pieces"
    TEMPLATE_MARKS = "template_marks"
    LOOP = "loop"
    LANGUAGE = "language"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingFault:
    kind: Fault
    seen: str


def reading_faults(text: str, ids: Sequence[int], language: str | None) -> tuple[ReadingFault, ...]:
    """`ids`: the answer's tokens, or none where they are not known. `language`: the expected one, ISO 639-1."""
    faults = []
    text = _CUT_CHARACTER.sub("", text)
    if (seen := fault_of(text)) is not None:
        faults.append(ReadingFault(kind=Fault.GARBAGE, seen=seen))
    raw = _RAW_PIECES.findall(text)
    if len(raw) >= 2:  # one alone may be meant
        faults.append(ReadingFault(kind=Fault.RAW_PIECES, seen=f"{len(raw)} undecoded pieces such as `{raw[0]}`"))
    if marks := _TEMPLATE_MARKS.search(text):
        faults.append(ReadingFault(kind=Fault.TEMPLATE_MARKS, seen=f"the template's mark `{marks[0]}` in the answer"))
    if (loop := loop_of(ids)) is not None:
        period, copies = loop
        faults.append(ReadingFault(kind=Fault.LOOP, seen=f"its last {period} tokens stand there {copies} times"))
    if language is not None and (share := script_share(text, language)) is not None and share < _LEAST_SHARE:
        seen = f"{share:.0%} of its letters are of the script of `{language}`"
        faults.append(ReadingFault(kind=Fault.LANGUAGE, seen=seen))
    return tuple(faults)


def loop_of(ids: Sequence[int]) -> tuple[int, int] | None:
    """(period, copies) of an endless repetition at the end: at least four copies over half of the answer."""
    n = len(ids)
    if n < _LOOP_LEAST_TOKENS:
        return None
    for period in range(1, n // _LOOP_COPIES + 1):
        same = 0
        while same < n - period and ids[n - 1 - same] == ids[n - 1 - same - period]:
            same += 1
        copies = (same + period) // period
        if copies >= _LOOP_COPIES and copies * period >= _LOOP_SHARE * n:
            return period, copies
    return None


def script_share(text: str, language: str) -> float | None:
    """Share of letters in the language's script; None for too few letters or a language that is not known here."""
    scripts = _SCRIPTS.get(language.lower()[:2])
    letters = [c for c in text if c.isalpha()]
    if scripts is None or len(letters) < _LEAST_LETTERS:
        return None
    return sum(unicodedata.name(c, "").startswith(scripts) for c in letters) / len(letters)
