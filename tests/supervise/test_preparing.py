"""What a running rack keeps when its file is laid out anew, and specs that survive in the state file."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from llamarack.config import parse
from llamarack.errors import DoesNotFit
from llamarack.model.gguf_header import read_header
from llamarack.model.read import read_model
from llamarack.supervise.layout import lay_out
from llamarack.supervise.preparing import prepare, with_cards_kept
from llamarack.supervise.spec_json import spec_from_json, spec_to_json
from tests.fake_adaptor import FakeEngine, fake_spec
from tests.plan.shapes import card, machine
from tests.tiny_model import write_tiny_llama


def _deployment(path: Path, replicas: int, more: str = ""):
    return parse(f"models: [{{name: m, path: {path}, replicas: {replicas}{more}}}]").deployment


def test_running_replicas_keep_their_cards_and_new_ones_get_others(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    specs = {path: read_model(path)}
    cards = [card(index, "RTX 4090", 24564) for index in range(3)]
    before = lay_out(_deployment(path, 1), machine(*cards), specs)
    # The card that it runs on has a little less free than the others now: planned anew, it would move.
    moved = machine(replace(cards[0], memory_free_bytes=cards[0].memory_total_bytes - 2**30), *cards[1:])
    assert before[0].card_uuids == ["GPU-0"]
    assert lay_out(_deployment(path, 1), moved, specs)[0].card_uuids != ["GPU-0"]
    kept = with_cards_kept(_deployment(path, 2), before, moved)
    after = lay_out(kept, moved, specs)
    assert after[0].card_uuids == ["GPU-0"]
    assert after[1].card_uuids != ["GPU-0"]
    assert after[0].fingerprint == before[0].fingerprint
    assert [spec.id for spec in after] == ["m-0", "m-1"]


def test_edited_group_is_planned_anew(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    specs = {path: read_model(path)}
    here = machine(card(0, "RTX 4090", 24564), card(1, "RTX 4090", 24564))
    before = lay_out(_deployment(path, 1), here, specs)
    edited = _deployment(path, 1, ", limits: {sequences: 2}")
    assert with_cards_kept(edited, before, here) == edited
    assert lay_out(edited, here, specs)[0].fingerprint != before[0].fingerprint
    explicit = _deployment(path, 1, ", gpus: [1]")
    assert with_cards_kept(explicit, before, here) == explicit


def test_fewer_threads_for_each_of_more_replicas_make_another_engine_on_the_processor(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    specs = {path: read_model(path)}
    one, two = (lay_out(_deployment(path, count), machine(), specs)[0] for count in (1, 2))
    assert one.fingerprint != two.fingerprint


def test_binary_that_was_replaced_makes_another_engine(tmp_path: Path) -> None:
    path, binary = write_tiny_llama(tmp_path / "m.gguf"), tmp_path / "llama-server"
    specs = {path: read_model(path)}
    seen = set()
    for content in ("old", "newer"):
        binary.write_text(content)
        seen.add(lay_out(_deployment(path, 1, f", engine_binary: {binary}"), machine(), specs)[0].fingerprint)
    assert len(seen) == 2


def test_spec_comes_back_from_json_as_it_was(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    here = machine(card(0, "RTX 4090", 24564), card(1, "RTX 3090", 24564))
    text = ", gpus: [[0, 1]], limits: {context_tokens: 256, sequences: 2}, env: {A: b}, engine_args: {x: 1}"
    (spec,) = lay_out(_deployment(path, 1, text), here, {path: read_model(path)})
    stored = orjson.loads(orjson.dumps(spec_to_json(spec)))
    assert spec_from_json(stored, {"llamacpp": spec.adaptor}) == spec
    assert spec_from_json({**stored, "candidate": {"engine": "llamacpp"}}, {"llamacpp": spec.adaptor}) is None
    assert spec_from_json(None, {}) is None
    fake = fake_spec("fake-0", tmp_path, crash_after=3)
    again = spec_from_json(spec_to_json(fake), {"llamacpp": FakeEngine()})
    assert again is not None
    assert again.group == fake.group


async def test_prepared_rack_keeps_no_header_in_memory(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    header = read_header(path)
    assert (await prepare(_deployment(path, 1, ", gpus: []"), None)).specs
    assert read_header(path) is not header


def test_refusal_of_copies_that_do_not_fit_speaks_of_no_negative_memory(tmp_path: Path) -> None:
    """Each copy is planned into what those before it leave, which may be less than nothing."""
    path = write_tiny_llama(tmp_path / "m.gguf")
    huge = _deployment(path, 2, ", gpus: [], limits: {context_tokens: 2000000000}")
    with pytest.raises(DoesNotFit, match=r" 0 B are free") as caught:
        lay_out(huge, machine(), {path: read_model(path)})
    assert ", -" not in caught.value.message
