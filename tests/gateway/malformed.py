"""Requests that no client should send, made from a seed: bytes of a whole connection, any of them."""

import json
import random
from typing import Any

PATHS = (
    *("/v1/chat/completions", "/chat/completions", "/v1/completions", "/v1/v1/completions", "/v1/embeddings"),
    *(
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/fake",
        "/v1/models/",
        "/metrics",
        "/health",
        "/version",
        "/",
    ),
)
METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "QUERY")
FIELDS = (
    *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "tools"),
    *("stop", "temperature", "n_predict", "tokens", "content", "input", "logprobs", "response_format", "tool_choice"),
)
ODD_TEXT = (
    "",
    "\x00",
    "\u2028",
    "🙂",
    "\ud800",
    "a" * 5000,
    "fake",
    "data: [DONE]\n\n",
    "\r\n\r\n",
    "../..",
    "%00",
    '"',
)
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**30, -0.0, 1e308, 0.1)
HEADERS = (
    *("Content-Type", "Content-Length", "Transfer-Encoding", "Content-Encoding", "Connection", "Upgrade", "Expect"),
    *("Authorization", "api-key", "X-Request-Id", "Host", "Accept", "traceparent", "Cookie", "X-Odd", "Range", "TE"),
)
ODD_VALUES = (
    *(
        "",
        "0",
        "-1",
        "3",
        "99999999999999999999",
        "chunked",
        "gzip",
        "br",
        "deflate",
        "identity",
        "close",
        "keep-alive",
    ),
    *(
        "Upgrade, HTTP2-Settings",
        "h2c",
        "websocket",
        "100-continue",
        "Bearer ",
        "Bearer \xff",
        "\xff\xfe",
        "a\tb",
        "\x01",
    ),
    *("text/plain; charset=\xff", "application/json;;;=", "multipart/form-data; boundary=", "x" * 9000, "bytes=0-"),
)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(ODD_NUMBERS)
    if kind in (3, 4, 5):
        return rng.choice(ODD_TEXT)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = (
        rng.choice((*FIELDS, "role", "content", "include_usage", "type", "function", "name", "")) for _ in range(3)
    )
    return {name: value(rng, depth + 1) for name in names}


def body(rng: random.Random) -> bytes:
    sound: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    for _ in range(rng.randrange(4)):
        sound[rng.choice(FIELDS)] = value(rng)
    if rng.random() < 0.3:
        sound["stream"] = True
    raw = json.dumps(sound, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return mutated(rng, raw) if rng.random() < 0.4 else raw


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Bytes changed, dropped, doubled, or cut."""
    out = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at : at + rng.randrange(1, 9)]
            case 2:
                out[at:at] = out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = rng.choice((b"[" * 2000, b"{", b'"', b"\\u", b"\xff", b"\x00", b"\r\n", b"\r\n\r\n", b":"))
            case 4:
                del out[at:]
    return bytes(out)


def framed(rng: random.Random, payload: bytes) -> tuple[dict[str, str], bytes]:
    """Headers that tell the length, rightly or not, and the body as it is sent."""
    kind = rng.random()
    if kind < 0.6:
        return {"Content-Length": str(len(payload))}, payload
    if kind < 0.9:
        cut = rng.randrange(len(payload) + 1)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (payload[:cut], payload[cut:]) if piece)
        if rng.random() < 0.3:
            chunks = mutated(rng, chunks)
        return {"Transfer-Encoding": "chunked"}, chunks + b"0\r\n\r\n"
    return {"Content-Length": str(max(0, len(payload) + rng.randrange(-9, 10)))}, payload


def request(rng: random.Random) -> bytes:
    """One connection's bytes: mostly one request, sometimes two, sometimes noise."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n"
    path = rng.choice(PATHS[:4] if rng.random() < 0.6 else PATHS)
    if rng.random() < 0.15:
        path = rng.choice(
            (
                path + "?" + "q" * rng.randrange(3000),
                path + "%ff%0a",
                "/" + "v1/" * 50,
                "//" + path,
                "*",
                "http://x" + path,
            )
        )
    length, payload = framed(rng, body(rng))
    headers = {"Host": "rack", **length}
    for _ in range(rng.randrange(3)):
        headers[rng.choice(HEADERS)] = rng.choice(ODD_VALUES)
    method = "POST" if rng.random() < 0.8 else rng.choice(METHODS)
    lines = [f"{method} {path} HTTP/1.{rng.choice('1110')}", *(f"{k}: {v}" for k, v in headers.items())]
    raw = "\r\n".join([*lines, "", ""]).encode("latin-1") + payload
    if rng.random() < 0.1:
        raw = mutated(rng, raw)
    return raw + (request(rng) if rng.random() < 0.05 else b"")
