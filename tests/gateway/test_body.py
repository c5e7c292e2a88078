import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarack.config import Defaults
from llamarack.errors import BadRequest, ModelNotFound
from llamarack.gateway import body as bodies
from llamarack.supervise.table import ModelRow


def row(cap: int | None = None, **defaults: Any) -> ModelRow:
    return ModelRow(
        name="m", created_unix_s=1, defaults=Defaults(**{"max_tokens": None, **defaults}), max_output_tokens=cap
    )


def sent(raw: bytes, model: ModelRow, *, shape: str = "chat", **more: Any) -> bytes:
    return bodies.for_engine(raw, bodies.parse(raw, {"m": model}, shape=shape), model, **more)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
LIMIT = st.none() | st.integers(1, 2000)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(JSON, min_size=1, max_size=3)},
    optional={
        "model": st.just("m"),
        "max_tokens": LIMIT,
        "max_completion_tokens": LIMIT,
        "n_predict": st.integers(-2, 2000),
        "temperature": st.none() | st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "stream": st.booleans() | st.none(),
        "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": JSON}),
    },
)
MODELS = st.builds(
    row,
    cap=st.none() | st.integers(1, 1000),
    max_tokens=st.none() | st.integers(1, 1000),
    temperature=st.none() | st.floats(0, 2),
    top_p=st.none() | st.floats(0.1, 1),
)


@st.composite
def raw_bodies(draw: st.DrawFn) -> bytes:
    known, unknown = draw(BODIES), draw(st.dictionaries(TEXT.map(lambda name: "x" + name), JSON, max_size=3))
    items = draw(st.permutations([*known.items(), *unknown.items()]))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
    text = json.dumps(
        dict(items), indent=draw(st.sampled_from([None, 2])), ensure_ascii=draw(st.booleans()), separators=separators
    )
    return (draw(st.sampled_from(["", " ", "\r\n\t"])) + text + draw(st.sampled_from(["", "\n"]))).encode()


@given(raw_bodies(), MODELS)
def test_engine_gets_clients_fields_and_at_most_the_named_ones_beside(raw: bytes, model: ModelRow) -> None:
    given, got = json.loads(raw), json.loads(sent(raw, model))
    ours = {"max_tokens", "max_completion_tokens", "n_predict", "temperature", "top_p", "stream_options"}
    assert {k: v for k, v in got.items() if k not in ours} == {k: v for k, v in given.items() if k not in ours}
    for name in ("temperature", "top_p"):
        default = getattr(model.defaults, name)
        assert got.get(name, "absent") == given.get(name, "absent" if default is None else default)
    if given.get("stream"):
        assert got["stream_options"] == {**(given.get("stream_options") or {}), "include_usage": True}
    else:
        assert got.get("stream_options", "absent") == given.get("stream_options", "absent")


@given(raw_bodies(), MODELS)
def test_no_body_gets_past_the_cap_on_output(raw: bytes, model: ModelRow) -> None:
    got = json.loads(sent(raw, model))
    named = ("n_predict", "max_completion_tokens", "max_tokens")  # as llama.cpp looks them up
    limit = next((got[name] for name in named if got.get(name) is not None), None)
    if model.max_output_tokens is not None:
        assert limit is not None
        assert 0 <= limit <= model.max_output_tokens


@given(raw_bodies(), MODELS)
def test_clients_bytes_stay_as_they_are_around_an_insertion(raw: bytes, model: ModelRow) -> None:
    out = sent(raw, model)
    given = json.loads(raw)
    limits = ("max_tokens", "max_completion_tokens", "n_predict")
    must_change = "stream_options" in given or (model.max_output_tokens and any(name in given for name in limits))
    if must_change:
        return
    start = raw.index(b"{") + 1
    assert out.startswith(raw[:start])
    assert out.endswith(raw[start:])
    inserted = out[start : len(out) - len(raw) + start]
    added = json.loads(b"{" + inserted.removesuffix(b",") + b"}")
    assert not set(added) & set(given)


def test_body_that_needs_nothing_is_the_same_object() -> None:
    raw = b'{ "messages" : [1], "max_tokens": 3, "x": 1e2, "x": 2 }'
    assert sent(raw, row(cap=3)) is raw


@pytest.mark.parametrize("given", [{"max_tokens": 5}, {"max_tokens": None}, {}])
def test_default_is_for_those_who_say_nothing(given: dict[str, Any]) -> None:
    raw = json.dumps({"messages": [1], **given}).encode()
    assert json.loads(sent(raw, row(max_tokens=7))).get("max_tokens") == given.get(
        "max_tokens", 7 if not given else None
    )


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [1], "stream": "yes"}, "stream"),
        ({"messages": [1], "stream_options": [1]}, "stream_options"),
        ({"messages": [1], "max_tokens": 0}, "max_tokens"),
        ({"messages": [1], "max_tokens": True}, "max_tokens"),
        ({"messages": [1], "max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"messages": [1], "model": 3}, "model"),
        ({"messages": [1], "n": 0}, "n"),
        ({"messages": [1], "n": True}, "n"),
        ({"messages": [1], "n": 129}, "n"),
        ({"messages": [1], "stop": [3]}, "stop"),
        ({"messages": [1], "response_format": {"type": "grammar"}}, "response_format"),
        ({"messages": [1], "response_format": "json"}, "response_format"),
    ],
)
def test_field_of_another_type_is_named_with_what_was_given(value: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        bodies.parse(json.dumps(value).encode(), {"m": row()}, shape="chat")
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"  ", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"messages":[1]} {}'])
def test_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        bodies.parse(raw, {"m": row()}, shape="chat")


def test_completion_may_ask_for_no_tokens_and_chat_may_not() -> None:
    raw = b'{"prompt":[1,2],"max_tokens":0,"echo":true}'
    assert sent(raw, row(), shape="text") is raw
    with pytest.raises(BadRequest):
        sent(b'{"messages":[1],"max_tokens":0}', row())


def test_unknown_model_is_told_what_is_served() -> None:
    with pytest.raises(ModelNotFound, match=r"`nope`.*`m`") as caught:
        bodies.parse(b'{"model":"nope","messages":[1]}', {"m": row()}, shape="chat")
    assert caught.value.code == "model_not_found"


def test_body_without_a_model_is_refused_where_there_are_several() -> None:
    with pytest.raises(BadRequest) as caught:
        bodies.parse(b'{"messages":[1]}', {"m": row(), "n": row()}, shape="chat")
    assert caught.value.param == "model"


def test_default_for_the_output_gives_way_to_a_long_prompt_and_the_clients_own_limit_does_not() -> None:
    raw = b'{"messages":[1]}'
    assert json.loads(sent(raw, row(max_tokens=512), room_tokens=40))["max_tokens"] == 40
    assert json.loads(sent(raw, row(max_tokens=512), room_tokens=4000))["max_tokens"] == 512
    own = b'{"messages":[1],"max_tokens":600}'
    assert sent(own, row(max_tokens=512), room_tokens=40) == own


def test_model_of_an_azure_path_wins_over_the_bodys() -> None:
    served = {"m": row(), "n": row()}
    for raw, wanted in (
        (b'{"messages":[1]}', b'{"model":"m","messages":[1]}'),
        (b'{"messages":[1],"model":"m"}', b'{"messages":[1],"model":"m"}'),
        (b'{"messages":[1],"model":"n"}', b'{"messages":[1],"model":"m"}'),
    ):
        parsed = bodies.parse(raw, served, shape="chat", deployment="m")
        assert parsed.model == "m"
        assert json.loads(bodies.for_engine(raw, parsed, row())) == json.loads(wanted)


def test_responses_have_their_own_names_and_keep_no_conversation() -> None:
    raw = b'{"input":"x","stream":true}'
    assert json.loads(sent(raw, row(cap=9), shape="responses")) == {
        "input": "x",
        "stream": True,
        "max_output_tokens": 9,
    }
    over = b'{"input":"x","max_output_tokens":10}'
    assert json.loads(sent(over, row(cap=9), shape="responses"))["max_output_tokens"] == 9
    for body, param in ((b'{"input":"x","previous_response_id":"r"}', "previous_response_id"), (b"{}", "input")):
        with pytest.raises(BadRequest) as caught:
            bodies.parse(body, {"m": row()}, shape="responses")
        assert caught.value.param == param
