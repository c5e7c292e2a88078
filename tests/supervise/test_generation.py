"""Which running replicas an edited file keeps, and what the new ones are called."""

from dataclasses import replace
from pathlib import Path

import pytest

from llamarack.config import parse
from llamarack.errors import UsageError
from llamarack.supervise.generation import Present, generation_of, matched, named, place_of
from llamarack.supervise.live_settings import require_changeable
from llamarack.supervise.replica_record import ReplicaSpec
from tests.fake_adaptor import fake_spec


def _specs(folder: Path, *rows: tuple[str, str]) -> list[ReplicaSpec]:
    return [replace(fake_spec(id, folder), fingerprint=fingerprint) for id, fingerprint in rows]


def test_ids_tell_place_and_generation() -> None:
    assert (place_of("llama-0-g12"), generation_of("llama-0-g12")) == ("llama-0", 12)
    assert (place_of("a-g2-0"), generation_of("a-g2-0")) == ("a-g2-0", 1)
    assert (named("a-0", 1), named("a-0", 3)) == ("a-0", "a-0-g3")


def test_what_is_as_the_file_wants_it_stays_and_the_rest_gets_new_ids(tmp_path: Path) -> None:
    present = [Present(id="m-0", fingerprint="x"), Present(id="m-1-g2", fingerprint="y")]
    specs = _specs(tmp_path, ("m-0", "z"), ("m-1", "y"), ("m-2", "x"))
    assert [spec.id for spec in matched(present, specs, 3)] == ["m-0-g3", "m-1-g2", "m-0"]


def test_of_alike_replicas_the_one_in_its_place_stays_then_a_ready_one(tmp_path: Path) -> None:
    present = [
        Present(id="m-0", fingerprint="x", is_ready=False),
        Present(id="m-1", fingerprint="x"),
        Present(id="m-2", fingerprint="x", is_ready=False),
    ]
    assert [spec.id for spec in matched(present, _specs(tmp_path, ("m-1", "x")), 2)] == ["m-1"]
    assert [spec.id for spec in matched(present, _specs(tmp_path, ("m-5", "x")), 2)] == ["m-1"]


def test_no_two_get_one_id(tmp_path: Path) -> None:
    present = [Present(id="m-1", fingerprint="x"), Present(id="m-0-g2", fingerprint="old")]
    specs = _specs(tmp_path, ("m-0", "new"), ("m-1", "other"), ("m-2", "x"))
    ids = [spec.id for spec in matched(present, specs, 1)]
    assert ids == ["m-0", "m-1-g2", "m-1"]
    assert matched(present, specs[:1], 2)[0].id == "m-0-g3"


def test_where_a_rack_listens_cannot_change_while_it_runs_and_all_else_can() -> None:
    old = parse("models: [{name: a, path: x.gguf}]\ngateway: {port: 8080}").deployment
    new = parse("models: [{name: b, path: y.gguf}]\ngateway: {port: 9000, workers: 2, max_queue_s: 5}").deployment
    with pytest.raises(
        UsageError, match=r"`gateway.port` is `8080`, `9000` in the file; `gateway.workers` is `1`, `2`"
    ):
        require_changeable(old, new, rack="r")
    new = parse("models: [{name: b, path: y.gguf}]\ngateway: {max_queue_s: 5, routing: session}").deployment
    require_changeable(old, new, rack="r")
