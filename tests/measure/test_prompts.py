"""Prompts are of the asked length, never the same twice, and the question files are what they say."""

from pathlib import Path

import pytest

from llamarack.errors import UsageError
from llamarack.measure.prompts import FromFile, Question, Synthetic, common_words, load_questions, prompt

SYNTHETIC = Synthetic(input_tokens=40, words=common_words(), first_word_tokens=6, seed=1)


def test_synthetic_prompt_has_one_word_a_token_beyond_the_template() -> None:
    words = prompt(SYNTHETIC, point=0, repeat=0, index=0).text.split()
    assert len(words) == 1 + (40 - 6)
    assert set(words[1:]) <= set(common_words())


def test_no_two_prompts_share_an_opening_across_requests_points_repeats_and_seeds() -> None:
    places = [(p, r, i) for p in range(3) for r in range(3) for i in range(50)]
    sources = [SYNTHETIC, Synthetic(input_tokens=40, words=common_words(), first_word_tokens=6, seed=2)]
    openings = [prompt(s, point=p, repeat=r, index=i).text.split()[1:9] for s in sources for p, r, i in places]
    assert len({tuple(opening) for opening in openings}) == len(openings)


def test_prompt_is_a_function_of_its_place() -> None:
    assert prompt(SYNTHETIC, point=1, repeat=2, index=3) == prompt(SYNTHETIC, point=1, repeat=2, index=3)


def test_common_words_are_distinct_plain_words() -> None:
    assert len(set(common_words())) == len(common_words()) >= 128
    assert all(word.isalpha() and word.islower() for word in common_words())


@pytest.mark.parametrize(("name", "language"), [("business-zh", "zh"), ("business-en", "en")])
def test_built_in_questions_are_twenty_distinct_ones_in_their_language(name: str, language: str) -> None:
    questions = load_questions(name)
    assert len({question.text for question in questions}) == len({question.id for question in questions}) == 20
    assert {question.language for question in questions} == {language}
    is_chinese = [sum("\u4e00" <= c <= "\u9fff" for c in q.text) > len(q.text) / 2 for q in questions]
    assert set(is_chinese) == {language == "zh"}


def test_question_opens_with_a_nonce_unless_the_cache_is_wanted() -> None:
    questions = (Question(id="a", text="Why?"),)
    cold = FromFile(name="f", questions=questions, seed=1)
    warm = FromFile(name="f", questions=questions, seed=1, has_nonce=False)
    first, second = (prompt(cold, point=0, repeat=0, index=i).text for i in (0, 1))
    assert first != second
    assert first.endswith(" Why?")
    assert prompt(warm, point=0, repeat=0, index=5).text == "Why?"


@pytest.mark.parametrize("line", ["{", '{"text": "x"}', '{"prompt": 5}', '{"prompt": " "}', "[]"])
def test_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(UsageError, match="line 3"):
        load_questions(str(path))


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_questions(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="holds no prompts"):
        load_questions(str(tmp_path / "empty"))
