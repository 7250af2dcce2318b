"""Reading a request: what is honoured is kept, everything else is refused by its name."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)

from inference_engine.errors import InvalidArgument
from inference_engine.server.http.chat_request import (
    HONOURED,
    MAX_ESCAPES,
    MAX_VALUES,
    ChatRequest,
    counted,
    read_request,
)
from inference_engine.server.http.error_replies import BadJson, UnknownModel, body_of
from inference_engine.types import Sampling

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def read(**parameters: Any) -> ChatRequest:
    return read_request(json.dumps({"model": "m", "messages": MESSAGES, **parameters}).encode())


def test_what_is_honoured_is_kept() -> None:
    assert read(
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.25,
        seed=3,
        logit_bias={"5": -2},
        stop="END",
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        allow_special_tokens=True,
    ) == ChatRequest(
        model="m",
        messages=tuple(MESSAGES),
        sampling=Sampling(temperature=0.5, top_p=0.25, seed=3, logit_bias={5: -2.0}),
        max_tokens=7,
        max_tokens_name="max_completion_tokens",
        stops=("END",),
        logprobs=True,
        stream=True,
        include_usage=True,
        allow_special_tokens=True,
    )


TAKEN: list[dict[str, Any]] = [
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"response_format": {"type": "text"}},
    {"tools": [], "tool_choice": "none"},
    {"logprobs": False, "top_logprobs": 0},
    {"store": False, "modalities": ["text"]},
]


def test_values_that_ask_for_what_happens_anyway_are_taken(subtests: pytest.Subtests) -> None:
    for parameters in TAKEN:
        with subtests.test(str(parameters)):
            assert read(**parameters) == read()


def test_null_is_the_same_as_nothing() -> None:
    nothing = dict.fromkeys([*HONOURED, "tools", "anything"])
    assert read(**{**nothing, "model": "m", "messages": MESSAGES}) == read()


CONTENTS: list[tuple[Any, str]] = [
    ("a", "a"),
    ("", ""),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
]


def test_content_is_text_or_text_parts(subtests: pytest.Subtests) -> None:
    for content, text in CONTENTS:
        with subtests.test(content=content, text=text):
            assert read(messages=[{"role": "user", "content": content}]).messages[0]["content"] == text


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer: Any = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    assert read(messages=[*MESSAGES, answer]).messages[1] == {"role": "assistant", "content": "Hi"}


NOT_HONOURED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 5}, "top_k"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"frequency_penalty": False}, "frequency_penalty"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"session_id": "abc"}, "session_id"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 10_000}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"allow_special_tokens": "yes"}, "allow_special_tokens"),
    ({"user": "someone"}, "user"),
    ({"model": None}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0]",
    ),
]


def test_what_is_not_honoured_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    for parameters, field in NOT_HONOURED:
        with subtests.test(field=field, given=str(parameters)[:60]):
            with pytest.raises(InvalidArgument) as refused:
                read(**parameters)
            assert refused.value.field == field
            assert field in refused.value.message


# What the installed client can send: a parameter it learns later is in these lists by itself.
PARAMETERS = sorted(
    {*CompletionCreateParamsNonStreaming.__annotations__, *CompletionCreateParamsStreaming.__annotations__}
)
MESSAGE_FIELDS = sorted({name for kind in get_args(ChatCompletionMessageParam) for name in kind.__annotations__})
PART_KINDS = sorted(
    {kind for part in get_args(ChatCompletionContentPartParam) for kind in get_args(get_type_hints(part)["type"])}
)


def test_every_other_parameter_of_the_client_is_refused_by_its_name() -> None:
    for name in set(PARAMETERS) - set(HONOURED):
        for value in ("x", 1, True, [1], {"x": 1}):
            assert refused_field({name: value}) == name, value


def test_every_other_field_of_a_message_is_refused_by_its_name(subtests: pytest.Subtests) -> None:
    for name in [name for name in MESSAGE_FIELDS if name not in ("role", "content")]:
        with subtests.test(name):
            assert refused_field({"messages": [{"role": "user", "content": "x", name: "x"}]}) == f"messages[0].{name}"


def test_every_kind_of_content_but_text_is_refused_by_its_place(subtests: pytest.Subtests) -> None:
    for kind in [kind for kind in PART_KINDS if kind != "text"]:
        with subtests.test(kind):
            part = {"type": kind, "text": "x"}
            assert refused_field({"messages": [{"role": "user", "content": [part]}]}) == "messages[0].content[0]"


@pytest.mark.parametrize("name", sorted(ChatCompletionStreamOptionsParam.__annotations__.keys() - {"include_usage"}))
def test_every_other_option_of_a_stream_is_refused_by_its_name(name: str) -> None:
    assert refused_field({"stream": True, "stream_options": {name: True}}) == f"stream_options.{name}"


ASKED = '"model": "m", "messages": [{"role": "user", "content": "a"}]'
REPEATED: list[tuple[str, str]] = [
    (f'{{{ASKED}, "max_tokens": 1, "max_tokens": 2}}', "max_tokens"),
    (f'{{{ASKED}, "stop": null, "stop": null}}', "stop"),
    (f'{{{ASKED}, "logit_bias": {{"5": 1, "5": 2}}}}', "logit_bias.5"),
    (
        f'{{{ASKED}, "stream_options": {{"include_usage": true, "include_usage": false}}}}',
        "stream_options.include_usage",
    ),
    ('{"messages": [{"role": "system", "role": "user", "content": "a"}]}', "messages[0].role"),
    ('{"messages": [{"content": [{"type": "text", "text": "a", "text": "b"}]}]}', "messages[0].content[0].text"),
    # One by an escape, and one in a value that another value replaces.
    (f'{{{ASKED}, "seed": 1, "s\\u0065ed": 2}}', "seed"),
    ('{"messages": [{"role": "a", "role": "b"}], "model": "m", "messages": []}', "messages"),
    ('{"metadata": {"a": [{"": 1, "": 2}]}}', "metadata.a[0]."),
]


def test_a_name_that_stands_twice_in_an_object_is_refused_by_its_path(subtests: pytest.Subtests) -> None:
    for body, field in REPEATED:
        with subtests.test(field=field, given=body):
            with pytest.raises(InvalidArgument, match="stands more than once") as refused:
                read_request(body.encode())
            assert refused.value.field == field


def test_a_body_that_is_no_json_object_is_refused(subtests: pytest.Subtests) -> None:
    for body in (b"", b"{", b"[]", b'"x"', b'{"temperature": NaN}', b"\xff\xfe", b"[" * 100_000):
        with subtests.test(str(body[:20])), pytest.raises(BadJson):
            read_request(body)


UNREADABLE = [
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, "too deep in each other"),
    (b'{"a":' + b"1" * 5000 + b"}", "a number has 5000 digits; the limit is 4000"),
    (b'{"a":-' + b"1" * 4001 + b"}", "a number has 4001 digits"),
    (b"\xef\xbb\xbf{}", "begins with a byte order mark; send it without"),
]


def test_a_body_that_the_parser_cannot_read_is_refused_in_words_for_its_sender(subtests: pytest.Subtests) -> None:
    """The parser's own name functions of Python."""
    for body, reason in UNREADABLE:
        with subtests.test(reason), pytest.raises(BadJson, match=reason) as refused:
            read_request(body)
        assert not {"recursion", "sys.", "utf-8-sig"} & set(str(refused.value).split())


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("piece", ["[]", "{}", "1", '{"":[]}', '"\\\\"'])
def test_a_body_of_tiny_values_is_refused_before_it_is_parsed(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser holds the interpreter's lock to its end: 4 MiB of empty lists keep every stream waiting for 0.2 s."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    count = 2**22 // (len(piece) + 1)
    with pytest.raises(BadJson, match=f"JSON values; the limit is {MAX_VALUES}"):
        read_request(f'{{"messages":[{",".join([piece] * count)}]}}'.encode())


@pytest.mark.parametrize("piece", ["a\\n", "\\u0041", '\\"', "\\ud83d\\ude00", "\\\\"])
def test_a_body_of_escapes_is_refused_before_it_is_parsed(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'{{"messages":[{{"content":"{piece * (2**22 // len(piece))}"}}]}}'.encode()
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(BadJson, match=rf"escapes such as \\n .* the limit is {MAX_ESCAPES}. Send characters"):
        read_request(body)


def test_a_text_that_is_escaped_is_taken_as_it_is_with_as_many_escapes_as_are_allowed() -> None:
    message = {"role": "user", "content": "é" * MAX_ESCAPES}
    assert read(messages=[message]).messages == (message,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('"\\,[]{}aé')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('"\\,[{a')), inner),
)


@given(json_values, st.integers(1, 9))
@settings(max_examples=40)
def test_values_and_escapes_of_a_body_are_counted_and_empty_values_twice(value: Any, piece_bytes: int) -> None:
    """However its pieces cut through strings and escapes."""

    def values(one: Any) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else "a value"
        return 1 + (not inner) + (0 if inner == "a value" else sum(map(values, inner)))

    body = json.dumps(value)
    assert counted(body.encode(), piece_bytes) == (values(value), len(re.findall(r"\\.", body)))


@given(parameters=st.dictionaries(st.sampled_from(HONOURED), JSON, max_size=6))
@settings(max_examples=40)
def test_whatever_a_parameter_is_given_it_is_read_or_refused_by_a_name(parameters: dict[str, Any]) -> None:
    field = refused_field(parameters)
    assert not field or field.startswith(HONOURED)


def refused_field(parameters: dict[str, Any]) -> str:
    """Raises whatever is not a refusal by name."""
    try:
        read(**parameters)
    except InvalidArgument as refused:
        return refused.field
    return ""


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({f"own_{number}": 1 for number in range(5000)}, "own_0, own_1, "),
        ({LONG: 1}, "(100000 characters)"),
        ({"messages": [{"role": "user", "content": "Hello", LONG: 1}]}, "(100000 characters)"),
        ({"stream": True, "stream_options": {LONG: True}}, "(100000 characters)"),
        ({"n": LONG}, "(100002 characters)"),
        ({"logit_bias": {LONG: 1}}, "'xxxxxxxxxxxxxxxxxxxx'"),
        ({"logit_bias": {str(number): 1 for number in range(30_000)}}, "at most 1024 entries, got 30000"),
    ],
    ids=["many", "parameter", "message", "option", "count", "id", "ids"],
)
def test_a_refusal_is_short_whatever_it_refuses(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(**parameters)
    assert named in refused.value.message
    assert len(json.dumps(body_of(refused.value))) < 2000
    assert len(json.dumps(body_of(UnknownModel(LONG, "tiny")))) < 500
