"""Takes secrets and prompts out of text that leaves the site. Pure.

Three layers, since none alone is enough: the values that are known to be secret, wherever they stand; forms that
secrets have; and for logs of engines, which may hold what users wrote, only lines of a known shape, without the texts
quoted in them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

_SHORTEST_SECRET = 6  # shorter values (`1`, `true`) would blank out half of every file
_SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:key|keys|apikey|token|secret|passw(?:or)?d|passphrase|pwd|credentials?|auth|authorization|cookie|"
    r"bearer|signature|webhook|dsn|private)(?:[^a-z]|$)"
)
# Names that end like a secret and hold none: counts of tokens, paths of key files.
_HARMLESS_NAME = re.compile(
    r"(?:max|min|context|output|input|batch|prompt|new|num|total|train|special|bos|eos|pad|unk|eot|sep|added)_?tokens?$"
    r"|tokens?_(?:id|ids|per_s|type|mean|total)$|_tokens$|(?:keys?|cert|token)_(?:file|path|dir)$|keyboard|keys_total|^(?:old)?pwd$"
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_FORMS = tuple(
    (kind, re.compile(form))
    for kind, form in (
        ("bearer", r"(?i)(?<=bearer )[^\s\"',;]+"),
        ("basic", r"(?i)(?<=basic )[A-Za-z0-9+/=]{8,}"),
        ("jwt", r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"),
        # Keys of llamarack, OpenAI, Hugging Face, GitHub, GitLab, Slack, AWS, Google, by their documented prefixes.
        ("key", r"\b(?:lr-[A-Za-z0-9_-]{16,}|sk-[A-Za-z0-9_-]{8,}|hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}"
                r"|github_pat_[A-Za-z0-9_]{8,}|glpat-[A-Za-z0-9_-]{8,}|xox[a-z]-[A-Za-z0-9-]{8,}|A[KS]IA[A-Z0-9]{12,}"
                r"|AIza[A-Za-z0-9_-]{20,})"),
        ("url password", r"(?<=://)[^\s/@\"'`]+(?=@)"),
        ("url query", r"(?<=\?)[^\s\"'`>]*(?:key|token|secret|sig|auth|pass)[^\s\"'`>]*"),
        # As YAML, JSON, shell, header, or an option with its value.
        ("named", r"(?i)(?<![A-Za-z])[A-Za-z0-9_.-]*(?:api[_-]?key|apikey|token|secret|passw(?:or)?d|passphrase|"
                  r"credential|authorization|cookie)[A-Za-z0-9_.-]*[\"']?(?:\s*[:=]\s*|\s+(?=[\"'A-Za-z0-9]*[0-9]))"
                  r"(?:\"[^\"]*\"|'[^']*'|\[[^\]]*\]|(?:Bearer |Basic )?[^\s,;}\])]+)"),
        # Long random words: at least 28 characters with letters of both kinds, or hex, and digits.
        ("random", r"(?<![A-Za-z0-9_/+-])(?!GPU-|MIG-)(?=[A-Za-z0-9_+-]*[0-9])(?=[A-Za-z0-9_+-]*[a-z])"
                   r"(?=[A-Za-z0-9_+-]*[A-Z])[A-Za-z0-9_+-]{28,}={0,2}(?![A-Za-z0-9_/+.-])"),
        ("random", r"(?<![A-Za-z0-9_/+.-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{32,}(?![A-Za-z0-9_/+.-])"),
    )
)  # fmt: skip
_NAMED_HEAD = re.compile(r"(?i)^(?P<head>[A-Za-z0-9_.-]+[\"']?(?:\s*[:=]\s*|\s+))")

# What a log line of an engine, of the gateway or of Python begins with. Whatever begins otherwise may be a prompt.
_KNOWN_LINE = re.compile(
    r"""^(?:
      \([A-Za-z_ =0-9]+\)\s                                     # (EngineCore_DP0 pid=123) of vLLM, before the rest
    )*(?:
      (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[:\s]                # vLLM, uvicorn
    | \d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d                        # a date: the gateway, Python's logging
    | \[?\d{4}-\d\d-\d\d\ \d\d:\d\d:\d\d
    | \d\d:\d\d:\d\d\ [·!✗✓]\s                                  # events as `serve` shows them
    | \d+\.\d+\.\d+\.\d+\ [DIWE]\s                              # llama.cpp with --log-prefix
    | (?:llama|ggml|gguf|common|server|srv|slot|main|init|print_info|load|load_tensors|sched|build|system_info|set_|
         create_|graph_|n_threads|que|res|clip|sampler|chat|update_slots|launch_slot|process|keeper|alloc|reserve)
         [A-Za-z0-9_]*(?:\ +[A-Za-z0-9_~]+)?\s*[:=]             # llama.cpp: function: text
    | Traceback\ \(most\ recent | \ \ File\ " | \ {4,}(?:(?:raise|return|self|await)\b|\^+|~+)
    | [A-Za-z_.]+(?:Error|Exception|Warning|Interrupt|Exit)\b
    | (?:torch|vllm|cuda|CUDA|nccl|NCCL)[A-Za-z0-9_.]*[:\ ]
    | \s*$
    )""",
    re.VERBOSE,
)
_OWN_RECORD = '{"time_unix_s":'  # events and the gateway's log, where JSON was asked for
# Where a text of a user's begins inside a line of known shape; the rest of the line goes.
_TEXT_BEGINS = re.compile(
    r"(?i)(?:[\"']?\b(?:prompt|prompts|messages|content|text|input|inputs|completion|generated|delta|response|"
    r"request_body|body|question|answer|query|token_ids|prompt_token_ids)[\"']?\s*(?:[:=]|is\b)\s*)(?=\S)"
)
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|(?<![A-Za-z])'(?:[^'\\]|\\.)*'|`[^`]*`|“[^”]*”|«[^»]*»")
# Our own sentences quote names and commands in backticks; those stay.
_QUOTED_IN_RECORDS = re.compile(_QUOTED.pattern.replace("|`[^`]*`", ""))
_PLAIN_QUOTED = re.compile(r"[A-Za-z0-9_./:=,@+-]{0,120}")  # a file, an option, a name: one word
_NOT_LATIN = re.compile(r"[^\x00-\x7f\u00a0-\u00ff–—…‘’“”·×✗✓]+(?:[\s\d，。、]*[^\x00-\x7f\u00a0-\u00ff–—…‘’“”·×✗✓]+)*")


def is_secret_name(name: str) -> bool:
    """Whether a variable, key or option of this name is likely to hold a secret."""
    lower = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return bool(_SECRET_NAME.search(lower)) and not _HARMLESS_NAME.search(lower)


class Mask:
    """`counts`: how often something of each kind was taken out."""

    def __init__(self, secrets: Iterable[str], *, names: Mapping[str, str] | None = None) -> None:
        """`secrets`: values known to be secret. `names`: what else to replace (folders, users, hosts), and by what."""
        known = {value for value in secrets if len(value) >= _SHORTEST_SECRET}
        self.secrets = frozenset(known)
        self.counts: Counter[str] = Counter()
        longest_first = sorted(known, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if known else None
        self._names = dict(sorted((names or {}).items(), key=lambda item: -len(item[0])))

    def text(self, text: str) -> str:
        """Without known secrets, without what looks like one; names replaced where that was asked for."""
        if self._known is not None:
            text = self._known.sub(lambda _: self._taken("known"), text)
        text = _PEM.sub(lambda _: self._taken("pem"), text)
        for kind, form in _FORMS:
            text = form.sub(lambda match, kind=kind: self._of_form(kind, match[0]), text)  # type: ignore[misc]
        for name, shown in self._names.items():
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", shown, text)
        return text

    def log(self, text: str) -> str:
        """A log that may hold prompts: lines of a known shape, without texts; of others, their length."""
        lines = []
        for line in text.splitlines():
            if line.startswith(_OWN_RECORD):
                lines.append(self._record(line))
                continue
            if len(line) > 4000 or not _KNOWN_LINE.match(line):
                self.counts["log line"] += 1
                lines.append(f"<line of {len(line)} characters>")
                continue
            lines.append(self.text(self._without_texts(line)))
        return "\n".join(lines) + "\n"

    def _record(self, line: str) -> str:
        try:
            return orjson.dumps(self.value(orjson.loads(line))).decode()
        except ValueError:  # cut off in the middle
            self.counts["log line"] += 1
            return f"<line of {len(line)} characters>"

    def value(self, value: Any, *, name: str = "") -> Any:
        """A JSON value: what stands under a secret's name goes whole, log tails line by line, strings by `text`."""
        match value:
            case dict():
                return {self.text(str(key)): self.value(each, name=str(key)) for key, each in value.items()}
            case list() | tuple():
                if name == "log_tail":
                    return self.log("\n".join(map(str, value))).splitlines()
                return [self.value(each, name=name) for each in value]
            case str() if value and is_secret_name(name):
                return self._taken("named")
            case str():
                return self.text(self._without_texts(value, _QUOTED_IN_RECORDS))
        return value

    def _without_texts(self, line: str, quoted: re.Pattern[str] = _QUOTED) -> str:
        begins = _TEXT_BEGINS.search(line)
        if begins is not None:
            line = line[: begins.end()] + self._taken("text")
        line = quoted.sub(lambda match: self._of_quoted(match[0]), line)
        return _NOT_LATIN.sub(lambda _: self._taken("text"), line)

    def _of_quoted(self, quoted: str) -> str:
        inner = quoted[1:-1]
        return quoted if _PLAIN_QUOTED.fullmatch(inner) else quoted[0] + self._taken("text") + quoted[-1]

    def _of_form(self, kind: str, found: str) -> str:
        if "<masked" in found:
            return found
        if kind != "named":
            return self._taken(kind)
        head = _NAMED_HEAD.match(found)
        name = re.match(r"[A-Za-z0-9_.-]+", found)
        value = found[head.end() :] if head else ""
        is_harmless = name is not None and not is_secret_name(name[0])
        if head is None or is_harmless or value in {"null", "None", "none", '""', "''", "[]", "true", "false"}:
            return found
        return head["head"] + self._taken(kind)

    def _taken(self, kind: str) -> str:
        self.counts[kind] += 1
        return f"<masked {kind}>"
