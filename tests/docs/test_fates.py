"""Every command in the documents is run by a test, or is on the list of those that cannot be, with the reason."""

from __future__ import annotations

import pytest

from tests.docs.fates import ELSEWHERE, HERE, NO_COMMANDS, NOT_RUN, WHOLE_DOCUMENTS, fates
from tests.docs.reading import DOCUMENTS, ROOT, Command, typed

COMMANDS = [
    command
    for document in DOCUMENTS
    if str(document.relative_to(ROOT)) not in NO_COMMANDS
    for command in typed(document)
]
TEXTS = {command.text for command in COMMANDS}


def test_documents_show_commands():
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_is_run_or_named_as_one_that_cannot_be(command: Command):
    assert fates(command), (
        f"`{command.text}` ({command.document}:{command.line}) is run by no test: add it to tests/docs/fates.py, "
        "or mark its block as text"
    )


def test_no_command_hides_in_an_indented_block():
    for document in DOCUMENTS:
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            assert not line.startswith("    llamarack "), f"{document.name}:{number}: put it into a fence"


def test_new_command_would_be_noticed():
    unknown = Command("docs/new.md", 1, ("llamarack", "frobnicate"), True, "llamarack frobnicate")
    assert fates(unknown) == []


@pytest.mark.parametrize("text", [*ELSEWHERE, *sorted(HERE), *NOT_RUN])
def test_list_holds_nothing_that_no_document_says_any_more(text: str):
    assert text in TEXTS


@pytest.mark.parametrize(("text", "test"), [(text, name) for text, (name, _) in ELSEWHERE.items()])
def test_other_test_is_there_and_does_it(text: str, test: str):
    source = (ROOT / test).read_text()
    for words in ELSEWHERE[text][1]:
        assert words in source, f"{test} holds no {words}"


@pytest.mark.parametrize(("document", "test"), WHOLE_DOCUMENTS.items())
def test_whole_document_is_read_by_its_test(document: str, test: str):
    assert document.rpartition("/")[2] in (ROOT / test).read_text()
