"""Tensors that do not make up what the header promises, and the sizes of models that people know."""

from dataclasses import replace

import pytest

from llamarack.errors import ModelError
from llamarack.plan.reference import gguf_spec, safetensors_spec
from llamarack.plan.shape import shape_of
from llamarack.units import GIB
from tests.plan.shapes import LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, LLAMA3_8B, SMOLLM2


# Tensor bytes: published GGUF file sizes less their headers (0.5 to 1 MB: vocabulary and tensor table).
@pytest.mark.parametrize(
    ("size", "label", "file_bytes"),
    [
        (LLAMA2_7B, "Q4_K_M", 4_081_004_224),
        (LLAMA2_13B, "Q4_K_M", 7_865_956_224),
        (LLAMA2_7B, "Q8_0", 7_161_089_728),
    ],
)
def test_sizes_are_those_of_published_files(size, label, file_bytes):
    assert 0 < file_bytes - gguf_spec(size, label).weights_bytes < 1_000_000


@pytest.mark.parametrize(
    ("size", "parameters"), [(LLAMA2_7B, 6.738e9), (LLAMA2_13B, 13.016e9), (LLAMA2_70B, 68.977e9), (LLAMA3_8B, 8.03e9)]
)
def test_parameters_are_the_models_own(size, parameters):
    assert safetensors_spec(size, "f16").weights_bytes / 2 == pytest.approx(parameters, rel=1e-3)
    shape = shape_of(safetensors_spec(size, "f16"))
    embedding = size.vocab_size * size.hidden_size
    assert shape.decode_parameters + embedding == pytest.approx(parameters, rel=1e-3)


def test_gptq_and_awq_are_about_4_bits_and_gptq_has_an_index_more():
    gptq, awq = (safetensors_spec(LLAMA2_7B, method).weights_bytes for method in ("gptq", "awq"))
    assert 3.5 < awq / GIB < 3.8
    assert gptq - awq == 32 * (6 * 4096 + 11008) * 4


def test_tensor_of_a_layer_that_the_header_does_not_have_is_refused():
    spec = gguf_spec(SMOLLM2, "Q8_0")
    with pytest.raises(ModelError, match="is of layer 29, the header says 29 layers"):
        shape_of(replace(spec, layers=29, kv_heads=spec.kv_heads[:29]))


def test_layer_without_tensors_is_refused():
    spec = gguf_spec(SMOLLM2, "Q8_0")
    with pytest.raises(ModelError, match="the header says 31 layers, layer 30 has no tensors"):
        shape_of(replace(spec, layers=31, kv_heads=(*spec.kv_heads, 3)))


def test_rows_of_quantised_matrices_are_padded_on_cards_only():
    padded = shape_of(gguf_spec(SMOLLM2, "Q8_0"))  # rows of 576 end on 1024
    assert padded.layers_before_padded_bytes[-1] > padded.layers_before_bytes[-1]
    even = shape_of(gguf_spec(LLAMA2_7B, "Q8_0"))  # rows of 4096; 11008 ends on 11264 in one of nine
    assert even.layers_before_padded_bytes[-1] == pytest.approx(even.layers_before_bytes[-1], rel=1e-4)


def test_copied_matrices_count_twice_on_the_cpu_where_the_file_maps_them_too():
    plain, copied = (shape_of(gguf_spec(LLAMA2_7B, label)) for label in ("Q8_0", "Q4_0"))
    assert plain.cpu_bytes == plain.spec.weights_bytes
    assert copied.spec.weights_bytes < copied.cpu_bytes < 2 * copied.spec.weights_bytes
