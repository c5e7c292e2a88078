"""Whatever a text editor saves: read, or refused with its line, in no time."""

from pathlib import Path

import pytest

from llamarack.errors import ConfigError
from llamarack.yaml_text import parse_yaml, read_text


def test_value_and_the_line_of_every_key() -> None:
    found = parse_yaml("a: 1\nb:\n  - c: x\n  - d\n", "f.yaml")
    assert found.value == {"a": 1, "b": [{"c": "x"}, "d"]}
    assert found.lines == {"a": 1, "b": 2, "b[0]": 3, "b[0].c": 3, "b[1]": 4}


def test_empty_text_has_no_value() -> None:
    assert parse_yaml("# nothing yet\n", "f.yaml").value is None


def test_merge_keys_work_and_may_be_overridden() -> None:
    found = parse_yaml("- &first {name: a, path: /m}\n- {<<: *first, name: b}\n", "f.yaml")
    assert found.value == [{"name": "a", "path": "/m"}, {"name": "b", "path": "/m"}]
    assert found.lines["[1].name"] == 2


def test_date_stays_text() -> None:
    assert parse_yaml("path: 2024-01-01\n", "f.yaml").value == {"path": "2024-01-01"}


def _bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "line 2: key `a` is given twice"),
        ("1: 2\n", "key `1` is not a word"),
        ("a:\n\t- b\n", "line 2"),
        ("a: [1\n", "`f.yaml` line"),
        ("a: !!python/object/apply:os.system [id]\n", "line 1"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: \x07\n", "line 1: the character U+0007 is not allowed"),
        ("a: &a [*a]\n", "line 1: an alias stands inside what it names"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        (_bomb(9), "more than 100,000 values"),
    ],
    ids=lambda text: text[:12],
)
def test_text_that_is_no_use_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x80abc"])
def test_file_that_is_not_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"gates file `.*` cannot be read: not UTF-8 text") as caught:
        read_text(path, "gates file")
    assert caught.value.hint


def test_folder_in_place_of_a_file_is_refused_with_the_callers_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory") as caught:
        read_text(tmp_path, "keys file", hint="llamarack keys add NAME")
    assert caught.value.hint == "llamarack keys add NAME"


def test_mark_at_the_start_of_a_windows_file_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\n")
    assert parse_yaml(read_text(path, "file"), "f.yaml").value == {"a": 1}
