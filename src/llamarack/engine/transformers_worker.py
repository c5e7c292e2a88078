"""The process that holds one model in PyTorch and answers one request at a time: the reference that others are held to.

`python -I transformers_worker.py OPTIONS.json`, by an interpreter that has torch and transformers; the key comes in the
environment. OpenAI's completions and chat over a Unix socket; token ids or text in; `prompt_logprobs` as vLLM answers
it. No batching, no compiled graphs, no paged cache: plain forward passes, so that there is little to be wrong.
Imports nothing of llamarack and is imported by none of it (`-I` keeps this folder, which has a
`transformers` of its own, out of the module path).
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from typing import Any

KEY_VARIABLE = "LLAMARACK_ENGINE_KEY"
_MAX_BODY_BYTES = 16 * 1024**2
_UNFINISHED = "\ufffd"  # what a decoder makes of the first bytes of a character


class Refused(Exception):
    """A request that cannot be answered; becomes HTTP 400."""


class Gone(Exception):
    """The client closed its connection."""


class Reference:
    """The model. One forward pass at a time: `lock` is held for a whole request."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        self.torch = torch
        self.name: str = options["served_name"]
        self.context_tokens: int = options["context_tokens"]
        if options["threads"]:
            torch.set_num_threads(options["threads"])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(options["tokenizer"], trust_remote_code=False)
        if options["chat_template"] is not None:
            self.tokenizer.chat_template = options["chat_template"]
        print(f"worker: transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=options["dtype"], trust_remote_code=False
        )
        self.model.to(self.device).eval()
        stops = self.model.generation_config.eos_token_id
        self.stops = {stops} if isinstance(stops, int) else set(stops or ())
        self.lock = threading.Lock()
        self.waiting = self.running = self.prompt_tokens = self.generated_tokens = 0

    def ids_of(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens", True)))
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            return prompt
        raise Refused("`prompt` must be one string or one list of token ids")

    def forward(self, ids: list[int], past: Any) -> tuple[Any, Any]:
        """Log-probabilities `(tokens, vocabulary)` in float32, and the cache with `ids` added."""
        torch = self.torch
        with torch.inference_mode():
            given = torch.tensor([ids], device=self.device)
            out = self.model(input_ids=given, past_key_values=past, use_cache=True)
            return torch.log_softmax(out.logits[0].float(), dim=-1).cpu(), out.past_key_values

    def top(self, row: Any, count: int, token: int) -> dict[str, dict[str, Any]]:
        """`token` first, then the `count` best, by id."""
        best = self.torch.topk(row, count).indices.tolist() if count else []
        rows = {}
        for one in [token, *best]:
            rank = int((row > row[one]).sum()) + 1
            rows[str(one)] = {"logprob": float(row[one]), "rank": rank, "decoded_token": self.tokenizer.decode([one])}
        return rows

    def choose(self, row: Any, body: dict[str, Any], random: Any) -> int:
        temperature = body.get("temperature")
        temperature = 1.0 if temperature is None else float(temperature)
        if temperature == 0:
            return int(row.argmax())
        torch = self.torch
        order = torch.sort(torch.softmax(row / temperature, dim=-1), descending=True)
        before = order.values.cumsum(-1) - order.values
        kept = order.values * (before < (body.get("top_p") or 1.0))
        if top_k := body.get("top_k"):
            kept[max(1, int(top_k)) :] = 0
        return int(order.indices[torch.multinomial(kept, 1, generator=random)])


class Answer:
    """One generation as it goes: token ids, their log-probabilities, the text so far."""

    def __init__(self, reference: Reference, body: dict[str, Any]) -> None:
        self.reference = reference
        self.body = body
        self.prompt_ids = reference.ids_of(body)
        asked = body.get("max_tokens", body.get("max_completion_tokens"))
        room = reference.context_tokens - len(self.prompt_ids)
        if not self.prompt_ids or room < (asked or 1):
            raise Refused(
                f"{len(self.prompt_ids)} prompt tokens and {asked or 1} to generate do not fit the context of "
                f"{reference.context_tokens} tokens"
            )
        self.max_tokens = room if asked is None else int(asked)
        stop = body.get("stop") or []
        self.stop_texts = [stop] if isinstance(stop, str) else list(stop)
        self.ids: list[int] = []
        self.logprobs: list[dict[str, dict[str, Any]]] = []
        self.prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
        self.text = ""
        self.finish_reason = "length"

    def pieces(self) -> Iterator[str]:
        """New text per token; empty where a character is unfinished."""
        reference, body = self.reference, self.body
        random = reference.torch.Generator()
        random.manual_seed(int(body["seed"])) if body.get("seed") is not None else random.seed()
        rows, past = reference.forward(self.prompt_ids, None)
        reference.prompt_tokens += len(self.prompt_ids)
        if (count := body.get("prompt_logprobs")) is not None:
            told = [reference.top(rows[at], int(count), token) for at, token in enumerate(self.prompt_ids[1:])]
            self.prompt_logprobs = [None, *told]
        row = rows[-1]
        while len(self.ids) < self.max_tokens:
            token = reference.choose(row, body, random)
            if token in reference.stops and not body.get("ignore_eos"):
                self.finish_reason = "stop"
                return
            self.ids.append(token)
            reference.generated_tokens += 1
            if body.get("logprobs"):
                shown = body.get("top_logprobs") if "messages" in body else body["logprobs"]
                self.logprobs.append(reference.top(row, int(shown or 0), token))
            yield self._grown()
            if self.finish_reason == "stop":
                return
            if len(self.ids) < self.max_tokens:
                rows, past = reference.forward([token], past)
                row = rows[-1]

    def _grown(self) -> str:
        whole: str = self.reference.tokenizer.decode(self.ids, skip_special_tokens=True)
        if whole.endswith(_UNFINISHED) and len(self.ids) < self.max_tokens:
            return ""
        for stop in self.stop_texts:
            if stop in whole:
                whole = whole[: whole.index(stop)]
                self.finish_reason = "stop"
        new, self.text = whole[len(self.text) :], whole
        return new

    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_ids), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def logprobs_record(self, first: int = 0) -> dict[str, Any] | None:
        """OpenAI's form for tokens from number `first` on."""
        if not self.logprobs:
            return None
        rows = [list(entries.values()) for entries in self.logprobs[first:]]
        if "messages" in self.body:
            return {"content": [_chat_logprob(row[0]) | {"top_logprobs": [*map(_chat_logprob, row)]} for row in rows]}
        if self.body.get("return_tokens_as_token_ids"):  # vLLM's way: two tokens may read the same
            named = [{f"token_id:{token}": e["logprob"] for token, e in row.items()} for row in self.logprobs[first:]]
        else:
            named = [{entry["decoded_token"]: entry["logprob"] for entry in row} for row in rows]
        return {
            "tokens": [next(iter(row)) for row in named],
            "token_logprobs": [row[0]["logprob"] for row in rows],
            "top_logprobs": named,
            "token_ids": self.ids[first:],
        }


def _chat_logprob(entry: dict[str, Any]) -> dict[str, Any]:
    text = entry["decoded_token"]
    return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reference: Reference
    key: str

    def log_message(self, format: str, *arguments: Any) -> None:
        pass  # neither prompts nor polls belong into the log

    def address_string(self) -> str:
        return "unix"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json(200, {"status": "ok"})
        elif not self._is_allowed():
            self._error(401, "a bearer key is needed")
        elif self.path == "/metrics":
            self._send(200, _metrics(self.reference).encode(), "text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            row = {"id": self.reference.name, "object": "model", "max_model_len": self.reference.context_tokens}
            self._json(200, {"object": "list", "data": [row]})
        else:
            self._error(404, f"unknown path {self.path}")

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
            if length > _MAX_BODY_BYTES:
                self.close_connection = True
                self._error(413, f"the body has {length} bytes, {_MAX_BODY_BYTES} are allowed")
                return
            raw = self.rfile.read(length)
            if not self._is_allowed():
                self._error(401, "a bearer key is needed")
                return
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise Refused("the body must be an object")
            self._answer(body)
        except (Gone, BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except (Refused, ValueError, TypeError, KeyError, LookupError) as error:
            self._error(400, str(error) or type(error).__name__)

    def _answer(self, body: dict[str, Any]) -> None:
        reference = self.reference
        if self.path == "/tokenize":
            ids = reference.ids_of(body)
            self._json(200, {"count": len(ids), "max_model_len": reference.context_tokens, "tokens": ids})
        elif self.path == "/detokenize":
            self._json(200, {"prompt": reference.tokenizer.decode(body["tokens"])})
        elif self.path in {"/v1/completions", "/v1/chat/completions"}:
            reference.waiting += 1
            with reference.lock:
                reference.waiting -= 1
                reference.running += 1
                try:
                    self._complete(body)
                finally:
                    reference.running -= 1
        else:
            self._error(404, f"unknown path {self.path}")

    def _complete(self, body: dict[str, Any]) -> None:
        answer = Answer(self.reference, body)
        is_chat = "messages" in body
        base = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self.reference.name,
        }
        if body.get("stream"):
            self._stream(answer, base, is_chat)
            return
        for _ in answer.pieces():
            self._require_client()
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        choice["logprobs"] = answer.logprobs_record()
        if is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice |= {"text": answer.text, "prompt_logprobs": answer.prompt_logprobs}
        self._json(200, base | {"choices": [choice], "usage": answer.usage()})

    def _stream(self, answer: Answer, base: dict[str, Any], is_chat: bool) -> None:
        """One event per token, the finish reason in an event of its own, usage when asked for, `[DONE]`."""
        if is_chat:
            base["object"] = "chat.completion.chunk"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if is_chat:
            self._event(base | {"choices": [_choice({"delta": {"role": "assistant", "content": ""}})]})
        for number, piece in enumerate(answer.pieces()):
            self._require_client()
            part = {"delta": {"content": piece}} if is_chat else {"text": piece}
            self._event(base | {"choices": [_choice(part | {"logprobs": answer.logprobs_record(number)})]})
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        self._event(base | {"choices": [_choice(last, answer.finish_reason)]})
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            self._event(base | {"choices": [], "usage": answer.usage()})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _require_client(self) -> None:
        """Raises Gone when the connection was closed: what is generated for nobody holds up everybody else."""
        try:
            if self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                raise Gone
        except BlockingIOError:
            pass

    def _is_allowed(self) -> bool:
        given = self.headers.get("Authorization") or ""
        return hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode())

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._send(status, json.dumps(value, ensure_ascii=False).encode(), "application/json")

    def _error(self, status: int, message: str) -> None:
        self._json(
            status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        )

    def _send(self, status: int, data: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _choice(part: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish_reason, **part}


def _metrics(reference: Reference) -> str:
    rows = {
        "generated_tokens_total": reference.generated_tokens,
        "prompt_tokens_total": reference.prompt_tokens,
        "requests_running": reference.running,
        "requests_waiting": reference.waiting,
    }
    return "".join(f"transformers_worker:{name} {value}\n" for name, value in rows.items())


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        options = json.load(file)
    Handler.key = os.environ[KEY_VARIABLE]
    Handler.reference = Reference(options)
    with Server(options["socket"], Handler) as server:
        print(f"worker: listening on {options['socket']}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
