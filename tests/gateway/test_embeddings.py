"""Embeddings with the real llama.cpp, as floats and as base64, and either form from an engine that has one only."""

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.gateway.embeddings import embeddings_answer
from tests.gateway.raw import ask
from tests.gateway.test_llamacpp import tiny_rack


class Answered:
    """The exchange's far end."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self.closing = False

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.body = status, body


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=6))
def test_either_form_of_the_engine_becomes_the_one_asked_for(values: list[float]) -> None:
    packed = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    for wanted, expected in (("float", values), ("base64", packed)):
        for given_form in (values, packed):
            exchange: Any = Answered()
            body = json.dumps({"object": "list", "data": [{"index": 0, "embedding": given_form}]}).encode()
            wrapped = embeddings_answer(exchange, {"encoding_format": wanted}, "m")
            wrapped.closing = True
            wrapped.answer(200, {}, body)
            assert json.loads(exchange.body)["data"][0]["embedding"] == expected
            assert exchange.closing


@pytest.mark.llamacpp
async def test_real_engine_embeds_texts_in_both_forms(tmp_path: Path) -> None:
    async with tiny_rack(tmp_path, engine_args={"embedding": True, "pooling_type": "mean"}) as (gateway, _):
        floats = (await ask(gateway, "/v1/embeddings", {"input": ["a b", "c"]})).json
        assert [row["index"] for row in floats["data"]] == [0, 1]
        assert floats["usage"]["prompt_tokens"] > 0
        coded = (await ask(gateway, "/v1/embeddings", {"input": ["a b", "c"], "encoding_format": "base64"})).json
        for row, other in zip(floats["data"], coded["data"], strict=True):
            raw = base64.b64decode(other["embedding"])
            assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(row["embedding"], abs=1e-6)
