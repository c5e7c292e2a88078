import gguf

from llamarack.model.ggml_types import FILE_TYPES, GGML_TYPES


def test_type_table_agrees_with_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    theirs[9] = ("Q8_1", 32, 36)  # the package counts two 4-byte scales, the struct in ggml-common.h has 2-byte ones
    ours = {type_id: tuple(kind) for type_id, kind in GGML_TYPES.items()}
    assert {type_id: row for type_id, row in ours.items() if type_id in theirs} == theirs


def test_file_types_are_named_as_llama_cpp_names_them() -> None:
    theirs = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    del theirs[1024]
    assert {number: name for number, name in FILE_TYPES.items() if number in theirs} == theirs
