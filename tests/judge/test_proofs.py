"""What was proved, and of which settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarack import config
from llamarack.judge.facts import Facts, differences, factors_of, load_facts, save_facts
from llamarack.judge.proofs import Proof, outdated, read_proofs, remember
from llamarack.paths import rack_paths
from llamarack.supervise.effective import deployment_sha256
from tests.tiny_model import write_tiny_llama


def deployment(model: Path, more: str = "", gateway: str = "{}"):
    return config.parse(
        f"models:\n  - name: m\n    path: {model}\n    gpus: []\n{more}\ngateway: {gateway}\n"
    ).deployment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("gateway", ["{port: 9999}", "{host: 0.0.0.0, insecure: true}"])
def test_where_the_door_is_changes_no_hash(model: Path, gateway: str) -> None:
    assert deployment_sha256(deployment(model, gateway=gateway)) == deployment_sha256(deployment(model))


@pytest.mark.parametrize(
    "more",
    [
        "    limits: {sequences: 2}",
        "    replicas: 2",
        "    chat_template: llama-2",
        "    engine_args: {flash_attn_type: 1}",
        "    env: {OMP_NUM_THREADS: '1'}",
    ],
)
def test_what_answers_or_speed_hang_on_changes_the_hash(model: Path, more: str) -> None:
    assert deployment_sha256(deployment(model, more)) != deployment_sha256(deployment(model))


def test_writing_a_default_out_changes_no_hash_and_another_model_file_does(model: Path, tmp_path: Path) -> None:
    assert deployment_sha256(deployment(model, "    replicas: 1")) == deployment_sha256(deployment(model))
    copy = tmp_path / model.name
    copy.write_bytes(model.read_bytes())
    before = deployment_sha256(deployment(copy))
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert deployment_sha256(deployment(copy)) != before


def test_proofs_are_kept_by_kind_and_outdated_by_other_settings(tmp_path: Path) -> None:
    paths = rack_paths("r", tmp_path)
    assert read_proofs(paths) == {}
    for kind, sha in (("verify", "a"), ("bench", "b"), ("verify", "c")):
        remember(paths, kind, Proof(at_unix_s=1.0, deployment_sha256=sha, verdict="SAME", folder="/x"))
    proofs = read_proofs(paths)
    assert {kind: proof.deployment_sha256 for kind, proof in proofs.items()} == {"verify": "c", "bench": "b"}
    assert outdated(proofs, "c") == ("bench",)
    (paths.folder / "proofs.json").write_text("{")
    assert read_proofs(paths) == {}


def test_facts_come_back_and_only_known_ones_differ(tmp_path: Path) -> None:
    one = Facts(weights="F16", engine="vllm", devices=("0", "1"))
    save_facts(one, tmp_path)
    assert load_facts(tmp_path) == one
    other = Facts(weights="Q8_0", engine=None, devices=("0",), deployment_sha256="x")
    assert differences(one, other) == ("weights", "devices")
    assert factors_of(differences(one, other)) == ("quantisation", "parallelism")
    assert load_facts(tmp_path / "nowhere") == Facts()
