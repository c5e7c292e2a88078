import pytest

from tests.gateway.strict_parsers import PARSERS, ParserBroke

CHUNK = b'{"id":"i","created":1,"model":"m","choices":[{"index":0,"finish_reason":%s,"delta":{%s}}]}'
SOUND = b"data: " + CHUNK % (b"null", b'"content":"a"') + b"\n\n"
LAST = b"data: " + CHUNK % (b'"stop"', b"") + b"\n\ndata: [DONE]\n\n"
USAGE = b'{"id":"i","created":1,"model":"m","choices":[],"usage":{%s}}'
FULL_USAGE = USAGE % b'"prompt_tokens":1,"completion_tokens":1,"total_tokens":2'


@pytest.mark.parametrize("client", PARSERS)
def test_every_parser_reads_the_one_form(client: str) -> None:
    read = PARSERS[client](SOUND + SOUND + LAST)
    assert (read.text, read.finish_reason, read.error) == ("aa", "stop", None)


@pytest.mark.parametrize(
    ("client", "body"),
    [
        ("openai_java", b"data: " + FULL_USAGE + b"\n\n" + SOUND),
        ("openai_java", b"data: " + USAGE % b"" + b"\n\n"),
        ("langchain4j", b"data: " + CHUNK % (b'"abort"', b"") + b"\n\n"),
        ("simple_openai", b"event: x\n" + SOUND),
        ("simple_openai", b": comment\n" + SOUND),
        ("simple_openai", SOUND + b"\n" + SOUND),
        ("theokanning", b": comment\n\n"),
        ("theokanning", b"id: 1\n\n"),
        ("theokanning", b"retry: 3\n\n"),
        ("azure", b": comment\n\n"),
        ("azure", b"data: {}\ndata: {}\n\n"),
        ("okhttp_sse", b"data: [DONE]\n"),
        ("spring_ai", b'data: {"id":"i","model":"m","choices":[]}\n\n'),
        ("spring_ai", b'data: {"model":"m","choices":[]}\n\n'),
        ("spring_ai", b"data: " + CHUNK % (b"null", b'"role":""') + b"\n\n"),
        ("spring_ai", b"data: " + CHUNK % (b"null", b'"tool_calls":[]') + b"\n\n"),
    ],
)
def test_parser_breaks_where_its_client_does(client: str, body: bytes) -> None:
    with pytest.raises(ParserBroke):
        PARSERS[client](body)


def test_null_error_is_an_error_to_openai_java() -> None:
    assert PARSERS["openai_java"](b'data: {"error":null}\n\n').error is not None


def test_plain_error_data_is_not_seen_by_langchain4j() -> None:
    assert PARSERS["langchain4j"](b'data: {"error":{"message":"m"}}\n\n').error is None
