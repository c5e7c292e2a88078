"""Log-probabilities by token id from an OpenAI-compatible endpoint, whichever engine is behind it.

Asked along the answer, never for a whole prompt at once unless `score` is called: prompt log-probabilities make logits
of tokens x vocabulary, which no engine's memory plan holds (vLLM issues 5907, 5550, 52054: 7.5 GiB at 8192 x 152k, and
the engine dies). The limits here are checked before anything is sent.

llama.cpp (b11549) leaves out of its list every token that ends inside a character, as most Chinese ones of a byte-level
vocabulary do; what it lists next then reads as more than its own piece. `step` gets at those: the logits told are the
raw ones, so a bias can make it sample a token of whole characters without changing them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarack.errors import EngineError, UsageError
from llamarack.judge.observation import Position, Ranked
from llamarack.measure.client import Client

MAX_TOP = 20  # vLLM's max_logprobs by default (0.32); llama.cpp gives as many
MAX_SCORED_TOKENS = 512  # of one `score`: 512 x 152k x 4 bytes are 300 MiB of logits
MAX_SCORED_TOP = 5
MAX_PROMPT_TOKENS = 4096
_TOKEN_ID = "token_id:"  # how vLLM spells a token with return_tokens_as_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """`positions`: the answer's first tokens, without a gap; fewer than it has where some were not listed, and the end
    token may be missing. `is_whole`: nothing was left out before the end.
    """

    positions: tuple[Position, ...]
    text: str
    finish_reason: str | None
    is_whole: bool


class Asker:
    """One model of one endpoint. One request at a time per caller: log-probabilities are never asked for in bulk."""

    def __init__(self, client: Client, model: str, *, top: int, timeout_s: float) -> None:
        if not 2 <= top <= MAX_TOP:
            raise UsageError(f"`--top` is {top}, not 2 to {MAX_TOP}", hint="--top 10")
        self.client = client
        self.model = model
        self.top = top
        self.timeout_s = timeout_s
        self._whole_token: int | None = None

    async def tokens_of(self, text: str, *, add_special: bool) -> tuple[int, ...] | None:
        """None where the endpoint does not tokenize."""
        body = {"prompt": text, "content": text, "add_special_tokens": add_special, "add_special": add_special}
        return await self._tokenize(body)

    async def prompt_of(self, question: str) -> tuple[int, ...] | None:
        """A question as the endpoint's own template writes it; None where it does not tokenize."""
        messages = [{"role": "user", "content": question}]
        ids = await self._tokenize({"messages": messages, "add_special_tokens": False, "add_generation_prompt": True})
        if ids:
            return ids
        rendered = await self._post("/apply-template", {"messages": messages})  # llama.cpp without a gateway
        if rendered is None or not isinstance(rendered.get("prompt"), str):
            return None
        return await self._tokenize({"content": rendered["prompt"], "add_special": False, "parse_special": True})

    async def text_of(self, ids: Sequence[int]) -> str | None:
        answer = await self._post("/detokenize", {"model": self.model, "tokens": list(ids)})
        text = None if answer is None else answer.get("content", answer.get("prompt"))
        return text if isinstance(text, str) else None

    async def generate(
        self, ids: Sequence[int], *, max_tokens: int, ignore_end: bool = False, reuse: bool = True
    ) -> Generated:
        """Greedy. With `ignore_end` it runs on; `top` still tells the end token where the model prefers it. `reuse`:
        of the prompt cache; without it the prefix is computed anew.

        Raises EngineError (it refused or broke off), UsageError (over the limits, or no token ids).
        """
        if len(ids) > MAX_PROMPT_TOKENS:
            raise UsageError(
                f"a prompt of {len(ids)} tokens is over the {MAX_PROMPT_TOKENS} that are compared",
                hint="--prompts with shorter questions",
            )
        body: dict[str, Any] = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, "logprobs": self.top}
        body |= {"return_tokens_as_token_ids": True, "cache_prompt": reuse, "ignore_eos": ignore_end}
        if not reuse:  # `cache_prompt` is llama.cpp's; vLLM finds nothing under a salt that nobody used
            body["cache_salt"] = secrets.token_hex(8)
        choice, told = await self._complete(body)
        positions, has_gap = read_positions(choice.get("logprobs"))
        stopped = choice.get("finish_reason") == "stop"
        return Generated(
            positions=positions,
            text=str(choice.get("text") or ""),
            finish_reason=choice.get("finish_reason"),
            is_whole=not has_gap and (told is None or len(positions) >= told - stopped),
        )

    async def step(self, ids: Sequence[int]) -> Position:
        """The next token, whatever its bytes. Raises EngineError, UsageError."""
        told = await self.generate(ids, max_tokens=1, ignore_end=True)
        if not told.positions:
            body: dict[str, Any] = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "logprobs": self.top}
            body |= {"return_tokens_as_token_ids": True, "cache_prompt": True, "ignore_eos": True}
            choice, _ = await self._complete(body | {"logit_bias": {str(await self._token_of_whole_characters()): 100}})
            told = Generated(
                positions=read_positions(choice.get("logprobs"))[0], text="", finish_reason=None, is_whole=True
            )
        if not told.positions:
            raise EngineError(f"`{self.client.target.url}` gave no token after {len(ids)} tokens")
        best = told.positions[0]
        return Position(token_id=best.best_id, top=best.top)

    async def _token_of_whole_characters(self) -> int:
        if self._whole_token is None:
            ids = await self.tokens_of("a", add_special=False)
            if not ids:
                raise UsageError(
                    f"`{self.client.target.url}` does not tokenize", hint="--method text compares the answers alone"
                )
            self._whole_token = ids[-1]
        return self._whole_token

    async def score(self, ids: Sequence[int]) -> tuple[Position, ...]:
        """All tokens but the first in one request (`prompt_logprobs` of vLLM and the transformers worker).

        Raises UsageError over the limits or where the engine does not know the field.
        """
        if len(ids) > MAX_SCORED_TOKENS:
            raise UsageError(
                f"{len(ids)} tokens are over the {MAX_SCORED_TOKENS} that are scored in one request",
                hint="--method steps asks token by token",
            )
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0}
        choice, _ = await self._complete(body | {"prompt_logprobs": min(self.top, MAX_SCORED_TOP)})
        told = choice.get("prompt_logprobs")
        if not isinstance(told, list) or len(told) != len(ids):
            raise UsageError("this endpoint has no prompt_logprobs", hint="--method steps")
        return tuple(
            _position(token, {int(one): value["logprob"] for one, value in entry.items()})
            for token, entry in zip(ids[1:], told[1:], strict=True)
        )

    async def chat(self, question: str, *, max_tokens: int) -> Mapping[str, Any]:
        """The plain answer of an endpoint that gives nothing else."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
        return await self._call("/v1/chat/completions", body)

    async def _complete(self, body: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The choice, and how many tokens were made."""
        answer = await self._call("/v1/completions", body)
        return answer["choices"][0], (answer.get("usage") or {}).get("completion_tokens")

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Not tried again: a second request of the kind that ended an engine would end the next one."""
        size = len(body["prompt"]) if "prompt" in body else 0
        what = f"a request over {size} tokens" if size else "a question"
        try:
            answer = await self.client.call("POST", path, {"model": self.model, **body}, timeout_s=self.timeout_s)
        except (OSError, TimeoutError) as error:
            raise EngineError(
                f"`{self.client.target.url}` broke off at {what}: {error or type(error).__name__}",
                hint="llamarack status tells whether the engine died; --top, --output-tokens and shorter prompts "
                "ask less of it",
            ) from error
        value = answer.json()
        if answer.status != 200 or not isinstance(value, dict) or not value.get("choices"):
            said = answer.body.decode("utf-8", "replace")[:300]
            raise EngineError(f"`{self.client.target.url}` refused {what} with {answer.status}: {said}")
        return value

    async def _tokenize(self, body: dict[str, Any]) -> tuple[int, ...] | None:
        answer = await self._post("/tokenize", {"model": self.model, **body})
        tokens = None if answer is None else answer.get("tokens")
        return tuple(tokens) if isinstance(tokens, list) and all(isinstance(one, int) for one in tokens) else None

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """None where the endpoint does not know the path or refuses. Raises EngineError where it breaks off."""
        try:
            answer = await self.client.call("POST", path, body, timeout_s=self.timeout_s)
        except (OSError, TimeoutError) as error:
            raise EngineError(f"`{self.client.target.url}{path}`: {error or type(error).__name__}") from error
        value = answer.json() if answer.status == 200 else None
        return value if isinstance(value, dict) else None


def read_positions(logprobs: Any) -> tuple[tuple[Position, ...], bool]:
    """From llama.cpp's form (`content` with ids) or vLLM's (`tokens` as `token_id:N`); True: there is a gap behind
    them. Raises UsageError where ids are missing: two tokens may read the same.
    """
    if not isinstance(logprobs, dict):
        return (), False
    content = logprobs.get("content")
    if isinstance(content, list) and all(isinstance(entry.get("id"), int) for entry in content):
        return _read_content(content)
    tokens, tops, chosen = (logprobs.get(key) for key in ("tokens", "top_logprobs", "token_logprobs"))
    if not (isinstance(tokens, list) and isinstance(tops, list) and isinstance(chosen, list)) or not all(
        str(token).startswith(_TOKEN_ID) for token in tokens
    ):
        raise UsageError(
            "this endpoint gives no token ids with its log-probabilities",
            hint="llama.cpp's server and vLLM do; --method text compares the answers alone",
        )
    positions = tuple(
        _position(_id_of(token), {_id_of(token): own} | {_id_of(name): value for name, value in (top or {}).items()})
        for token, own, top in zip(tokens, chosen, tops, strict=True)
    )
    return positions, False


def _read_content(content: Sequence[Mapping[str, Any]]) -> tuple[tuple[Position, ...], bool]:
    positions: list[Position] = []
    for entry in content:
        tops = entry.get("top_logprobs") or ()
        own = next((one for one in tops if one["id"] == entry["id"]), entry)
        if own.get("bytes") != entry.get("bytes") and len(entry.get("bytes") or ()) > len(own.get("bytes") or ()):
            return tuple(positions), True  # it reads as more than its own piece: tokens before it were left out
        logprobs = {entry["id"]: entry.get("logprob")} | {one["id"]: one.get("logprob") for one in tops}
        positions.append(_position(entry["id"], logprobs))
    return tuple(positions), False


def _id_of(name: str) -> int:
    return int(name.removeprefix(_TOKEN_ID))


def _position(token_id: int, logprobs: Mapping[int, float | None]) -> Position:
    known = [Ranked(one, float(value)) for one, value in logprobs.items() if value is not None]
    if not known:
        raise UsageError("this endpoint gives no log-probabilities", hint="--method text compares the answers alone")
    return Position(token_id=token_id, top=tuple(sorted(known, key=lambda one: (-one.logprob, one.token_id))))
