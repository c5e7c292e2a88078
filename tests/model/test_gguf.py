import os
import resource
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarack.errors import ModelError
from llamarack.model import gguf_header
from llamarack.model.gguf import read_gguf
from llamarack.model.gguf_header import StringArray
from tests import gguf_files
from tests.gguf_files import F16, F32, LLAMA2, Q4_0, SMALL, llama_metadata, llama_rows, write_llama
from tests.tiny_model import CHATML, write_tiny_llama


@pytest.mark.parametrize(
    ("size", "weights_bytes"), [("7b", 3_825_065_984), ("13b", 7_365_089_280), ("70b", 38_871_482_368)]
)
def test_gguf_of_llama2_q4_0_has_the_published_size(tmp_path: Path, size: str, weights_bytes: int) -> None:
    shape = LLAMA2[size]
    spec = read_gguf(gguf_files.write(tmp_path / "m.gguf", llama_metadata(**shape), llama_rows(**shape)))
    assert spec.weights_bytes == weights_bytes
    assert spec.quantization.method == "gguf"
    assert spec.quantization.label == "Q4_0"
    assert (spec.layers, spec.hidden_size, spec.vocab_size) == (shape["layers"], shape["hidden"], 32000)
    assert spec.kv_heads == (shape["kv_heads"],) * shape["layers"]
    assert spec.head_size_k == spec.head_size_v == 128


def test_gguf_header_of_70b_is_read_within_300_mb(tmp_path: Path) -> None:
    shape = LLAMA2["70b"]
    path = gguf_files.write(tmp_path / "m.gguf", llama_metadata(**shape), llama_rows(**shape))
    program = (
        "import re, sys, pathlib; from llamarack.model.gguf import read_gguf\n"
        "read_gguf(pathlib.Path(sys.argv[1]))\n"
        # Not ru_maxrss: that begins with what the process that started this one held.
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=True, timeout=60)
    assert int(done.stdout) * 1024 < 300e6


def test_gguf_of_the_gguf_package_is_described_as_that_package_reads_it(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    spec = read_gguf(path)
    theirs = gguf.GGUFReader(path)
    assert [(t.name, t.shape, t.type, t.size_bytes) for t in spec.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type.name, t.n_bytes) for t in theirs.tensors
    ]
    assert spec.chat_template == CHATML
    tokens = theirs.fields["tokenizer.ggml.tokens"].contents()
    assert spec.tokenizer.vocab_size == len(tokens)
    header = gguf_header.read_header(path)
    read_tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(read_tokens, StringArray)
    assert list(read_tokens) == tokens
    assert header.data_start_bytes == theirs.tensors[0].data_offset
    assert (spec.tokenizer.bos_id, spec.tokenizer.eos_id, spec.tokenizer.add_bos) == (1, 2, True)
    assert spec.quantization.method == "f16"
    assert spec.quantization.bits == 16


def test_string_array_knows_its_strings_and_no_part_of_one(tmp_path: Path) -> None:
    inner = (3).to_bytes(8, "little").decode() + "abc"  # as a string of its own would lie in the file
    path = write_llama(tmp_path / "m.gguf", tokenizer__ggml__tokens=["<s>", f"x{inner}", "é", "a"])
    tokens = gguf_header.read_header(path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert [word in tokens for word in ("<s>", f"x{inner}", "é", "a")] == [True] * 4
    assert [word in tokens for word in ("abc", "s", "", 7)] == [False] * 4


def test_header_is_kept_while_the_file_is_the_same_and_until_it_is_forgotten(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf")
    first = gguf_header.read_header(path)
    assert gguf_header.read_header(path) is first
    os.utime(path, ns=(0, 0))
    second = gguf_header.read_header(path)
    assert second is not first
    assert second.tensors == first.tensors
    gguf_header.forget_headers()
    assert gguf_header.read_header(path) is not second


def test_gguf_with_per_layer_arrays_keeps_each_layer(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf",
        llama__attention__head_count=[4, 2],
        llama__attention__head_count_kv=[2, 0],
        llama__feed_forward_length=[96, 32],
    )
    spec = read_gguf(path)
    assert spec.attention_heads == (4, 2)
    assert spec.kv_heads == (2, 0)
    assert spec.feed_forward_sizes == (96, 32)


def test_gguf_without_kv_heads_or_head_sizes_takes_the_engines_defaults(tmp_path: Path) -> None:
    metadata = llama_metadata(**SMALL)
    del metadata["llama.attention.head_count_kv"]
    spec = read_gguf(
        gguf_files.write(tmp_path / "m.gguf", metadata, llama_rows(**SMALL, type_id=F16, head_type_id=None))
    )
    assert spec.kv_heads == spec.attention_heads == (4, 4)
    assert (spec.head_size_k, spec.head_size_v) == (16, 16)
    assert spec.tied_embeddings


def test_gguf_embedding_padded_past_the_tokenizer_counts_both(tmp_path: Path) -> None:
    metadata = llama_metadata(**SMALL)
    tokens = metadata["tokenizer.ggml.tokens"]
    plain = read_gguf(write_llama(tmp_path / "plain.gguf", {**SMALL, "vocab": 290}))
    tokens[290:] = [f"[PAD{number}]" for number in range(290, 300)]
    spec = read_gguf(
        gguf_files.write(tmp_path / "m.gguf", metadata, llama_rows(**SMALL, type_id=F16, head_type_id=F16))
    )
    assert (spec.vocab_size, spec.tokenizer.vocab_size) == (300, 290)
    assert spec.tokenizer.sha256 == plain.tokenizer.sha256


def _write_split(folder: Path, *, count: int = 3) -> list[Path]:
    rows = llama_rows(**SMALL, type_id=F16, head_type_id=F16)
    paths = []
    for number in range(count):
        metadata: dict[str, Any] = llama_metadata(**SMALL) if number == 0 else {"general.architecture": "llama"}
        metadata |= {"split.no": number, "split.count": count, "split.tensors.count": len(rows)}
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(gguf_files.write(path, metadata, rows[number::count]))
    return paths


def test_gguf_split_set_is_read_whole_from_any_part(tmp_path: Path) -> None:
    paths = _write_split(tmp_path)
    whole = read_gguf(write_llama(tmp_path / "whole.gguf"))
    for path in paths:
        spec = read_gguf(path)
        assert spec.files == tuple(paths)
        assert spec.path == paths[0]
        assert spec.weights_bytes == whole.weights_bytes


def test_gguf_split_set_with_a_part_missing_names_it(tmp_path: Path) -> None:
    paths = _write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelError, match=paths[1].name):
        read_gguf(paths[0])


def test_gguf_split_set_with_parts_swapped_is_refused(tmp_path: Path) -> None:
    paths = _write_split(tmp_path)
    swap = tmp_path / "swap"
    paths[1].rename(swap)
    paths[2].rename(paths[1])
    swap.rename(paths[2])
    with pytest.raises(ModelError, match=r"split\.no"):
        read_gguf(paths[0])


def test_gguf_split_set_of_mixed_conversions_is_refused(tmp_path: Path) -> None:
    paths = _write_split(tmp_path)
    rows = llama_rows(**SMALL, type_id=F16, head_type_id=F16)
    gguf_files.write(paths[2], {"split.no": 2, "split.count": 3}, rows[2::3][:-1])
    with pytest.raises(ModelError, match=f"claims {len(rows)} tensors, its parts hold {len(rows) - 1}"):
        read_gguf(paths[0])
    gguf_files.write(paths[2], {"split.no": 2, "split.count": 3}, [*rows[2::3][:-1], rows[0]])
    with pytest.raises(ModelError, match="twice"):
        read_gguf(paths[0])


def test_gguf_part_numbered_past_its_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="part 00004 of 3"):
        read_gguf(write_llama(tmp_path / "m-00004-of-00003.gguf"))


def test_gguf_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    raw = gguf_files.header({"a": 1, "b": 2}, []).replace(gguf_files.text("b"), gguf_files.text("a"))
    path = tmp_path / "m.gguf"
    path.write_bytes(raw + bytes(64))
    with pytest.raises(ModelError, match="key `a` twice"):
        read_gguf(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, "wide"])
def test_gguf_rope_base_that_is_no_base_is_unknown(tmp_path: Path, value: Any) -> None:
    assert read_gguf(write_llama(tmp_path / "m.gguf", llama__rope__freq_base=value)).rope_freq_base is None


def test_gguf_part_renamed_to_stand_alone_is_refused(tmp_path: Path) -> None:
    path = _write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"split\.count"):
        read_gguf(path)


def test_gguf_cut_off_in_its_weights_names_the_tensor(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)
    with pytest.raises(ModelError, match=r"output\.weight.*cut off") as caught:
        read_gguf(path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": 3}, "no tensors of layer 2"),
        ({"llama.block_count": 1}, "tensors of layer 1"),
        ({"llama.block_count": 100_000}, "1 to 512"),
        ({"llama.block_count": "two"}, "block_count"),
        ({"llama.embedding_length": 65}, "shape"),
        ({"llama.embedding_length": 0}, "embedding_length"),
        ({"llama.attention.head_count": 65}, "more than the width"),
        ({"llama.attention.head_count": [4]}, "one for each layer"),
        ({"llama.attention.head_count": [0, 0]}, "one for each layer"),
        ({"llama.attention.head_count_kv": [-1, 2]}, "one for each layer"),
        ({"general.architecture": 7}, "general.architecture"),
        ({"general.architecture": "clip"}, "image projector"),
        ({"general.type": "adapter"}, "LoRA"),
        ({"general.alignment": 33}, "power of two"),
        ({"general.alignment": 0}, "power of two"),
        ({"tokenizer.ggml.scores": [0.0]}, "one for each token"),
        ({"nested": struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 4, 0)}, "array of type 9"),
        ({"typeless": struct.pack("<I", 99)}, "type 99"),
        ({"huge": struct.pack("<IIQ", 9, 8, 2**60)}, "strings"),
        ({"wide": struct.pack("<IIQ", 9, 10, 2**61)}, "needs"),
        ({"long": struct.pack("<IQ", 8, 2**63)}, "bound"),
    ],
)
def test_gguf_with_an_impossible_claim_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = llama_rows(**SMALL, type_id=F16, head_type_id=F16)
    path = gguf_files.write(tmp_path / "m.gguf", llama_metadata(**SMALL) | change, rows)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("x", (64,), 77), "type 77"),
        (("x", (64,), 4), "type 4"),
        (("x", (48,), Q4_0), "multiple of 32"),
        (("x", (0,), F32), "impossible shape"),
        (("x", (2**40, 2**40), F32), "impossible shape"),
        (("x", (1, 1, 1, 1, 1), F32), "5 dimensions"),
        (("x", (), F32), "0 dimensions"),
        (("x" * 64, (1,), F32), "64 bytes"),
        (("output.weight", (1,), F32), "twice"),
    ],
)
def test_gguf_with_an_impossible_tensor_is_refused(tmp_path: Path, row: gguf_files.Row, message: str) -> None:
    rows = llama_rows(**SMALL, type_id=F16, head_type_id=F16)
    raw = gguf_files.header(llama_metadata(**SMALL), rows)
    end = sum(-(-gguf_files.size_bytes(one) // 32) * 32 for one in rows)
    extra = gguf_files.text(row[0]) + struct.pack(f"<I{len(row[1])}QIQ", len(row[1]), *row[1], row[2], end)
    counted = raw[:8] + struct.pack("<Q", len(rows) + 1) + raw[16:] + extra
    path = tmp_path / "m.gguf"
    path.write_bytes(counted + bytes(end + 4096))
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_gguf_with_overlapping_tensors_is_refused(tmp_path: Path) -> None:
    raw = gguf_files.header(llama_metadata(**SMALL), [("a.weight", (64,), F32), ("b.weight", (64,), F32)])
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[:-8] + struct.pack("<Q", 128) + bytes(4096))
    with pytest.raises(ModelError, match="offset 128"):
        read_gguf(path)


@pytest.mark.parametrize(("version", "message"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_gguf_of_another_version_is_refused(tmp_path: Path, version: int, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.header({}, [], version=version) + bytes(64))
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.booleans()
        | st.integers(0, 2**32 - 1)
        | st.text(max_size=40)
        | st.lists(st.text(max_size=8), min_size=1, max_size=9)
        | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
        max_size=9,
    )
)
def test_gguf_metadata_of_any_kind_comes_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> None:
    path = gguf_files.write(tmp_path_factory.mktemp("m") / "m.gguf", data, [])
    read = gguf_header.read_header(path).metadata
    assert {key: list(item) if isinstance(item, (StringArray, array)) else item for key, item in read.items()} == data


@pytest.mark.parametrize("kept", ["header", "metadata"])
def test_gguf_cut_off_anywhere_in_its_header_is_a_model_error(tmp_path: Path, kept: str) -> None:
    rows = llama_rows(**SMALL, type_id=F16, head_type_id=F16) if kept == "header" else []
    raw = gguf_files.header(llama_metadata(**{**SMALL, "vocab": 20}), rows)
    path = tmp_path / "m.gguf"
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(ModelError):
            gguf_header.read_header(path)


def test_gguf_larger_than_any_header_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    string = struct.pack("<IQ", 8, 1024**2)  # each within its own bound
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 100))
        for number in range(100):
            file.write(gguf_files.text(f"k{number}") + string)
            file.seek(1024**2, 1)
        file.truncate(10 * 1024**3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match="header passes"):
        read_gguf(path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 300e6
