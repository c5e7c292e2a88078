"""What counts as an answer that does not read like one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.judge.reading import Fault, loop_of, reading_faults, script_share

SOUND = {
    "en": "The buyer should inspect the goods within five days, otherwise the deadline for payment never starts.",
    "zh": "买方应在五日内完成验收，否则付款期限无法起算，建议在合同中补充验收期限和默认验收条款。",
    "de": "Der Käufer prüft die Ware binnen fünf Tagen, sonst beginnt die Zahlungsfrist nicht zu laufen.",
    "ja": "買い手は五日以内に商品を検査しなければならず、そうでないと支払期限が始まりません。",
    "ru": "Покупатель проверяет товар в течение пяти дней, иначе срок оплаты не начинается.",
}


@pytest.mark.parametrize("language", SOUND)
def test_sound_text_in_its_language_has_no_fault(language: str) -> None:
    assert reading_faults(SOUND[language], range(60), language) == ()


def kinds(text: str, *, ids: tuple[int, ...] = (), language: str | None = None) -> set[Fault]:
    return {fault.kind for fault in reading_faults(text, ids, language)}


def test_answer_in_another_script_is_found_both_ways() -> None:
    assert kinds(SOUND["en"], language="zh") == {Fault.LANGUAGE}
    assert kinds(SOUND["zh"], language="en") == {Fault.LANGUAGE}
    assert kinds(SOUND["zh"], language="ja") == set()  # Han characters alone cannot tell them apart
    assert kinds(SOUND["en"], language="tlh") == set()  # unknown languages are not judged


def test_chinese_with_latin_terms_is_chinese() -> None:
    assert kinds("请先检查 VPN 连接，再重启 router 并更新 firmware 到最新版本。", language="zh") == set()
    assert script_share("OK 好", "zh") is None


def test_garbage_and_emptiness_are_found() -> None:
    assert Fault.GARBAGE in kinds("")
    assert Fault.GARBAGE in kinds("\ufffd\ufffd a \ufffd b \ufffd")


def test_answer_that_was_cut_inside_a_character_is_no_garbage() -> None:
    assert kinds("什么是不可抗力条款\ufffd\ufffd\ufffd", language="zh") == set()
    assert Fault.GARBAGE in kinds("什么\ufffd\ufffd\ufffd是不可抗力\ufffd\ufffd")


def test_undecoded_pieces_are_found_but_one_may_be_meant() -> None:
    assert Fault.RAW_PIECES in kinds("The\u0120buyer\u0120should\u0120inspect the goods")
    assert Fault.RAW_PIECES in kinds("\u2581The\u2581buyer should")
    assert Fault.RAW_PIECES in kinds("line<0x0A>line<0x0A>")
    assert kinds("Ġ is the mark of a space in a byte-level vocabulary") == set()


@pytest.mark.parametrize("mark", ["<|im_end|>", "[/INST]", "<</SYS>>", "<|start_header_id|>", "</s>"])
def test_marks_of_templates_are_found(mark: str) -> None:
    assert Fault.TEMPLATE_MARKS in kinds(f"The answer is five. {mark} user: what now?")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(4, 12), st.integers(0, 20))
def test_loop_is_found_whatever_stands_before_it(unit: list[int], copies: int, before: int) -> None:
    head = tuple(range(100, 100 + min(before, len(unit) * copies)))
    ids = (*head, *unit * copies)
    found = loop_of(ids)
    if len(ids) >= 24:
        assert found is not None
        period, times = found
        assert ids[-period:] * 2 == ids[-2 * period :]
        assert times >= 4
    else:
        assert found is None


def test_text_without_repetition_is_no_loop() -> None:
    drawn = random.Random(0)
    assert loop_of([drawn.randrange(1000) for _ in range(200)]) is None
    assert loop_of([1, 2, 3] * 3 + list(range(10, 60))) is None  # it ended by itself
