"""`verify` over real RPC devices: one device against two says the same, and a broken cut over two does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarack.errors import ModelError
from llamarack.model.demo import demo_model
from llamarack.paths import cache_dir
from tests.judge import broken_models as broken
from tests.judge.command import Verified, verify, write_questions, write_rack
from tests.native import find_llama_server, rpc_servers

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return demo_model(cache_dir(), print)
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("verify")).parent


@pytest.fixture(scope="module")
def over(home: Path) -> Iterator[Any]:
    """`over(name, model, share, ...)` -> deployment file: one device a share, none for none given."""
    binary = find_llama_server()
    with rpc_servers(binary, 2, home) as devices:

        def file(name: str, path: Path, *shares: float) -> Path:
            split = {"rpc_servers": devices[: len(shares)], "tensor_split": list(shares)} if len(shares) > 1 else {}
            split = split or {"rpc_servers": devices[: len(shares)]}
            return write_rack(home, name, path, engine_binary=str(binary), **split)

        yield file


@pytest.fixture(scope="module")
def two_against_one(home: Path, model: Path, over: Any) -> Verified:
    return verify(home, over("one", model, 1.0), over("two", model, 0.7, 0.3), "two", load_streams=2)


def test_two_devices_say_what_one_says(two_against_one: Verified) -> None:
    assert two_against_one.verdict in ("SAME", "ROUNDING"), two_against_one.record["findings"]
    assert two_against_one.exit_code == 0
    assert two_against_one.record["factors"] == ["parallelism"]
    assert two_against_one.record["forced"]["real"] == 0
    candidate = [one["factor"] for one in two_against_one.record["drift"] if not one["is_noise"]]
    assert candidate == ["parallelism", "batching"]


def test_broken_shard_over_two_devices_is_no_rounding(
    two_against_one: Verified, home: Path, model: Path, over: Any
) -> None:
    """A layer whose heads are in the wrong place: as different as the cut is allowed to be innocent."""
    wrong = broken.with_heads_swapped(model, home / "wrong.gguf", heads=(0, 3), layers=(25,))
    result = verify(home, home / "two" / "reference.json", over("wrong", wrong, 0.7, 0.3), "wrong")
    assert (result.verdict, result.exit_code) == ("BROKEN", 6)
    assert result.cause_codes[0] == "attention_heads"
    assert "blk.25.attn_q.weight head 0 holds the reference's 3" in result.evidence
