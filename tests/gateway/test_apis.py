"""What each API is answered: whole and in streams, cut by what was asked for, and refused in its own shape."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import openai
import pytest

from kakeya import Client
from kakeya.tokenization import tokens_for_chat
from kakeya_gateway import app
from tests.further import further_test
from tests.tiny_folder import END, tiny_tokenizer

HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# The smallest request of each, and where it has the messages.
SMALLEST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HELLO, "max_tokens": 5},
    MESSAGES: {"model": "tiny", "messages": HELLO, "max_tokens": 5},
    RESPONSES: {"model": "tiny", "input": "Hello", "max_output_tokens": 5},
}


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def events(http: httpx2.Client, path: str, **parameters: Any) -> list[dict[str, Any]]:
    reply = http.post(path, json={**SMALLEST[path], "stream": True, **parameters})
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def shown_of(ids: Sequence[int]) -> str:
    return str(tiny_tokenizer().decode(list(ids), skip_special_tokens=True))


def plain_answer(runtime: Client, max_tokens: int) -> str:
    """What a session says to HELLO."""
    with runtime.create_session() as session:
        session.append(tokens_for_chat(HELLO, tiny_tokenizer()))
        return shown_of(session.generate(max_tokens).result().token_ids)


def test_every_api_says_whole_and_in_a_stream_what_a_session_says(http: httpx2.Client, runtime: Client) -> None:
    expected = plain_answer(runtime, 5)
    whole = {path: http.post(path, json=body).raise_for_status().json() for path, body in SMALLEST.items()}
    assert whole[CHAT]["choices"][0]["message"]["content"] == expected
    assert whole[MESSAGES]["content"] == [{"type": "text", "text": expected}]
    assert whole[RESPONSES]["output"][0]["content"][0]["text"] == expected
    assert whole[CHAT]["choices"][0]["finish_reason"] == "length"
    assert whole[MESSAGES]["stop_reason"] == "max_tokens"
    assert whole[RESPONSES]["incomplete_details"] == {"reason": "max_output_tokens"}

    chunks = events(http, CHAT)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    deltas = [event["delta"] for event in events(http, MESSAGES) if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == expected
    seen = events(http, RESPONSES)
    assert "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta") == expected
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert seen[-1]["type"] == "response.incomplete"
    assert seen[-1]["response"]["output"] == [seen[-2]["item"]]


def test_an_answer_that_ends_by_itself_says_so_and_its_end_is_not_shown(http: httpx2.Client) -> None:
    body = SMALLEST[CHAT] | {"logit_bias": {str(tiny_tokenizer().convert_tokens_to_ids(END)): 1000}}
    reply = http.post(CHAT, json=body).json()
    assert reply["choices"][0]["message"]["content"] == ""
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("stop", 1)
    reply = http.post(CHAT, json=body | {"min_tokens": 3})
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_a_stop_string_cuts_the_answer_and_what_the_next_turn_reads(http: httpx2.Client, runtime: Client) -> None:
    text = plain_answer(runtime, 40)
    stop = text[4:7]
    body = SMALLEST[MESSAGES] | {"max_tokens": 40, "stop_sequences": ["never said", stop]}
    reply = http.post(MESSAGES, json=body).json()
    shown = text[: text.index(stop)]
    assert [part["text"] for part in reply["content"]] == [shown]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    longer = [*HELLO, {"role": "assistant", "content": shown}, {"role": "user", "content": "Go on"}]
    second = http.post(MESSAGES, json=SMALLEST[MESSAGES] | {"messages": longer}).raise_for_status().json()
    (session,) = runtime.sessions()
    (piece,) = runtime.session(session.id).history()
    assert shown_of(piece.token_ids).startswith(shown_of(tokens_for_chat(longer, tiny_tokenizer())))
    # The tokens of the answer are there, but for those of the stop string.
    began = len(tokens_for_chat(HELLO, tiny_tokenizer()))
    assert began < second["usage"]["cache_read_input_tokens"] < began + reply["usage"]["output_tokens"]


def test_a_response_goes_on_and_branches_by_its_id_and_is_there_until_it_is_deleted(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 5}
    first = client.responses.create(input="Hello", instructions="Be brief.", metadata={"of": "a test"}, **asked)
    second = client.responses.create(input="And?", previous_response_id=first.id, **asked)
    other = client.responses.create(input="Or?", previous_response_id=first.id, **asked)
    third = client.responses.create(input="Then?", previous_response_id=second.id, **asked)
    for later, earlier in ((second, first), (other, first), (third, second)):
        assert later.usage is not None
        assert earlier.usage is not None
        assert later.usage.input_tokens_details.cached_tokens >= earlier.usage.total_tokens - 1
    assert client.responses.retrieve(first.id) == first
    assert first.metadata == {"of": "a test"}
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="is not known"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        client.responses.create(input="x", previous_response_id=second.id, **asked)
    not_stored = client.responses.create(input="Hello", store=False, **asked)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_stored.id)
    with pytest.raises(openai.BadRequestError, match="instructions"):
        client.responses.create(input="x", instructions="Be long.", previous_response_id=third.id, **asked)


@further_test
def test_log_probabilities_are_those_of_the_tokens(client: openai.OpenAI, runtime: Client) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    logprobs = client.chat.completions.create(**asked).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    with runtime.create_session() as session:
        session.append(tokens_for_chat(HELLO, tiny_tokenizer()))
        details = list(session.generate(5, top_logprobs=3).details())
    assert [entry.logprob for entry in logprobs.content] == pytest.approx([each.logprob for each in details], abs=1e-5)
    tops = [[top.logprob for top in each.top_logprobs] for each in details]
    assert [[top.logprob for top in entry.top_logprobs] for entry in logprobs.content] == [
        pytest.approx(top, abs=1e-5) for top in tops
    ]
    of_response = client.responses.create(
        model="tiny", input="Hello", max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=3
    )
    part: Any = of_response.to_dict()["output"]
    said = [entry["logprob"] for entry in part[0]["content"][0]["logprobs"]]
    assert said == pytest.approx([each.logprob for each in details], abs=1e-5)


def test_a_body_that_is_too_long_is_refused_in_the_shape_of_its_api(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1000)
    long = json.dumps({"model": "tiny", "input": "a" * 1000}).encode()
    for path, kind in ((CHAT, "invalid_request_error"), (MESSAGES, "request_too_large")):
        pieces = (long[at : at + 100] for at in range(0, len(long), 100))
        for content in (long, pieces):  # of a length that is announced, or not
            reply = http.post(path, content=content, headers={"content-type": "application/json"})
            assert (reply.status_code, reply.json()["error"]["type"]) == (413, kind)
            assert "1000 bytes" in reply.json()["error"]["message"]
    assert http.post(CHAT, json=SMALLEST[CHAT]).status_code == 200


# What is refused, of which API, by which name.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 2}, "n"),
    (CHAT, {"unheard_of": 1}, "unheard_of"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_tokens"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}]}, "messages"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    (MESSAGES, {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_unknown"}]}, "input[0].id"),
]


def test_what_is_not_supported_is_refused_by_name_in_the_shape_of_its_api(
    http: httpx2.Client, subtests: pytest.Subtests
) -> None:
    for path, change, name in REFUSED:
        with subtests.test(f"{path} {name}"):
            reply = http.post(path, json=SMALLEST[path] | change)
            assert reply.status_code in (400, 404)
            error = reply.json()["error"]
            assert name in error["message"]
            if path == MESSAGES:
                assert (reply.json()["type"], error["type"]) == ("error", "invalid_request_error")
            else:
                assert error["param"] is not None


def test_a_model_that_is_not_served_is_not_found(http: httpx2.Client) -> None:
    for path, body in SMALLEST.items():
        reply = http.post(path, json=body | {"model": "gpt-4"})
        assert reply.status_code == 404
        assert "tiny" in reply.json()["error"]["message"]
    assert http.get("/v1/models").json()["data"] == [http.get("/v1/models/tiny").json()]
    assert http.get("/v1/models/gpt-4").status_code == 404


def test_a_page_that_calls_itself_this_machine_is_refused(http: httpx2.Client) -> None:
    assert http.get("/healthz", headers={"host": "rebound.example"}).status_code == 421
    reply = http.post(CHAT, content=json.dumps(SMALLEST[CHAT]), headers={"content-type": "text/plain"})
    assert reply.status_code == 400


def test_a_client_that_leaves_ends_its_answer_and_may_go_on_where_it_left(http: httpx2.Client, runtime: Client) -> None:
    body = SMALLEST[CHAT] | {"max_tokens": 4000, "stream": True}
    with http.stream("POST", CHAT, json=body) as reply:
        for _, line in zip(range(8), reply.iter_lines(), strict=False):
            assert not line or line.startswith("data: ")
    deadline = time.monotonic() + 30
    while any(each.is_generating for each in runtime.sessions()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (left,) = runtime.sessions()
    assert left.history_length < 4000
    usage = http.post(CHAT, json=SMALLEST[CHAT]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert len(list(runtime.sessions())) == 1
