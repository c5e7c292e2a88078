import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarack.errors import ModelError
from llamarack.model.read import read_model
from tests.huggingface_files import (
    edit_json,
    huggingface_name,
    write_safetensors,
    write_sharded,
    write_tiny_huggingface,
)
from tests.tiny_model import CHATML, write_tiny_llama


def test_gguf_and_safetensors_of_one_model_are_described_alike(tmp_path: Path) -> None:
    ours = read_model(write_tiny_huggingface(tmp_path / "hf"))
    theirs = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    differing = {"path", "files", "format", "tensors", "tokenizer"}
    for field in dataclasses.fields(ours):
        if field.name not in differing | {"quantization"}:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert (ours.quantization.method, ours.quantization.bits) == (theirs.quantization.method, theirs.quantization.bits)
    assert {t.name: (t.shape, t.size_bytes) for t in ours.tensors} == {
        huggingface_name(t.name): (t.shape[::-1], t.size_bytes) for t in theirs.tensors
    }
    same = {"file_sha256", "pre"}  # what only one of the two forms can say
    for field in dataclasses.fields(ours.tokenizer):
        if field.name not in same:
            assert getattr(ours.tokenizer, field.name) == getattr(theirs.tokenizer, field.name), field.name
    assert ours.chat_template == CHATML


def test_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    whole, sharded = (
        read_model(write_tiny_huggingface(tmp_path / "a")),
        read_model(write_sharded(tmp_path / "b", shards=3)),
    )
    assert len(sharded.files) == 3
    assert sorted(t.name for t in whole.tensors) == sorted(t.name for t in sharded.tensors)
    assert whole.weights_bytes == sharded.weights_bytes
    assert read_model(tmp_path / "b" / "model-00002-of-00003.safetensors") == sharded


def test_index_naming_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not there: model-00002-of-00002\.safetensors"):
        read_model(folder)


def test_index_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    (tmp_path / "other.safetensors").write_bytes((folder / "model-00002-of-00002.safetensors").read_bytes())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "../other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a safetensors file beside it"):
        read_model(folder)


def test_index_that_misplaces_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="where they are not"):
        read_model(folder)


def test_numbered_shards_without_an_index_must_be_complete(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", shards=3)
    (folder / "model.safetensors.index.json").unlink()
    assert len(read_model(folder).files) == 3
    (folder / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="2 of 3 shards"):
        read_model(folder)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(ModelError, match="both hold tensor"):
        read_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path, name: str) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    with (folder / name).open("r+b") as file:
        file.truncate(2**33)
    with pytest.raises(ModelError, match="the bound is"):
        read_model(folder)


def test_safetensors_header_larger_than_any_is_not_read(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 2**32))
        file.truncate(2**33)
    with pytest.raises(ModelError, match="the bound is"):
        read_model(folder)


def test_folder_with_pickled_weights_only_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="can run code") as caught:
        read_model(folder)
    assert "save_pretrained" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": None}, "`num_key_value_heads` is missing"),
        ({"num_key_value_heads": 4}, "has 32 rows, not 4 x 16"),
        ({"num_key_value_heads": 5}, "1 to 4"),
        ({"num_hidden_layers": 3}, "no tensors of layer 2"),
        ({"num_hidden_layers": 1}, "tensors of layer 1"),
        ({"num_hidden_layers": 2**40}, "1 to 1,024"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": 128}, "shape"),
        ({"hidden_size": None}, "is missing"),
        ({"intermediate_size": "wide"}, "intermediate_size"),
        ({"vocab_size": 32000}, "287 rows"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {}}, "not known"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 128}}, "gptq bits is `5`"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}, "group_size is `0`"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups"),
    ],
)
def test_config_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_tiny_huggingface(tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(folder)
    assert "config.json" in caught.value.message
    assert caught.value.hint


def test_config_without_kv_heads_is_told_the_line_to_add(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(write_tiny_huggingface(tmp_path / "m", num_key_value_heads=None))
    assert '"num_key_value_heads": 2' in str(caught.value.hint)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            ("gptq", "GPTQ-4bit-128g", 4, 128, None, "desc_act"),
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", "GPTQ-8bit", 8, None, None, None)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, ("awq", "AWQ-4bit-64g", 4, 64, None, None)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8", "FP8", 8, None, "fp8", "activations static")),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                        "input_activations": {"num_bits": 8, "type": "int"},
                    }
                },
            },
            ("compressed-tensors", "W8A8 (INT8)", 8, None, "int8", "int-quantized"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            ("compressed-tensors", "W4A16 (INT4)", 4, 128, None, None),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {
                        "weights": {"num_bits": 8, "type": "float"},
                        "input_activations": {"num_bits": 8, "type": "float"},
                    }
                },
            },
            ("compressed-tensors", "W8A8 (FP8)", 8, None, "fp8", None),
        ),
    ],
)
def test_quantization_config_is_named_as_people_name_it(
    tmp_path: Path, config: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    spec = read_model(write_tiny_huggingface(tmp_path / "m", quantization_config=config))
    assert dataclasses.astuple(spec.quantization) == expected


def test_quantization_of_an_old_gptq_folder_is_found_in_its_own_file(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert read_model(folder).quantization.label == "GPTQ-4bit-128g"


def test_integer_weights_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    tensors = {
        "model.embed_tokens.weight": np.zeros((287, 64), np.float16),
        "lm_head.weight": np.zeros((287, 64), np.float16),
    }
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.up_proj.qweight"] = np.zeros((512, 64), np.int32)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError, match="most weights are I32"):
        read_model(folder)


def test_tied_head_may_be_absent_only_where_the_config_says_tied(tmp_path: Path) -> None:
    tensors = {}
    folder = write_tiny_huggingface(tmp_path / "m", tie_word_embeddings=True)
    for tensor in read_model(folder).tensors:
        if tensor.name != "lm_head.weight":
            tensors[tensor.name] = np.zeros(tensor.shape, np.float16)
    write_safetensors(folder / "model.safetensors", tensors)
    assert read_model(folder).tied_embeddings
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match="no `lm_head"):
        read_model(folder)


def test_rope_base_is_found_where_transformers_5_puts_it(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert read_model(write_tiny_huggingface(tmp_path / "m", **changes)).rope_freq_base == 500000.0


def _raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x10\x00", "2 bytes"),
        (_raw(b"{}", length=2**63), "claims"),
        (_raw(b"x" * 40), "not JSON"),
        (_raw(b"[" * 5000), "not JSON"),
        (_raw([1]), "not an object"),
        (_raw({"a": 1}), "dtype"),
        (_raw({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}}), "dtype `Q4`"),
        (_raw({"a": {"dtype": "F16", "shape": [-1], "data_offsets": [0, 2]}}), "shape"),
        (_raw({"a": {"dtype": "F16", "shape": [1.5], "data_offsets": [0, 2]}}), "shape"),
        (_raw({"a": {"dtype": "F16", "shape": [2**62] * 8, "data_offsets": [0, 2]}}), "lies in 2 bytes"),
        (_raw({"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, b"\0\0"), "cut off"),
        (_raw({"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 9), "5 bytes after"),
        (_raw({"a": {"dtype": "F16", "shape": [2], "data_offsets": [2, 6]}}, b"\0" * 6), "hole"),
        (_raw({n: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for n in "ab"}, b"\0" * 4), "overlap"),
    ],
)
def test_safetensors_that_cannot_be_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_tiny_huggingface(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(folder)
    assert caught.value.hint
