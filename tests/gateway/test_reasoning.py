"""What a model says between the markers of its reasoning comes whole and streamed in each API's own place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from inference_engine.types import TokenBytes
from kakeya import AsyncSession, Client, Regex
from kakeya_gateway.texts import Thoughts
from tests.gateway.conftest import gateway_for
from tests.server_thread import server_thread
from tests.tiny import VOCABULARY
from tests.tiny_folder import CHARACTERS, END, tiny_tokenizer
from tests.tiny_native import served_engine

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%")
ENDED = "[ab]{3}\n</think>\n\n[cd]{3}"
SAID = {TEMPLATE: f"<think>\n{ENDED}", OPENED: ENDED}


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    others = range(len(CHARACTERS), VOCABULARY)
    names = (*(each.encode() for each in CHARACTERS), *(f"<{at}>".encode() for at in others))
    tokens = TokenBytes(tokens=names, specials=tuple(others))
    ends = (tiny_tokenizer().convert_tokens_to_ids(END),)
    engine = served_engine(windowed=False, end_ids=ends, read_tokens=lambda: tokens)
    with server_thread(engine) as target:
        yield target
    engine.close()


@pytest.fixture(params=[TEMPLATE, OPENED], ids=["marked", "opened by the prompt"])
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model thinks for three letters, and answers with three."""
    generate, template = AsyncSession.generate, str(request.param)

    def thinking(session: AsyncSession, *given: Any, **options: Any) -> Any:
        return generate(session, *given, **{**options, "constraint": Regex(SAID[template])})

    monkeypatch.setattr(AsyncSession, "generate", thinking)
    return template


@pytest.fixture
def tokenizer(template: str) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    return made


@pytest.fixture
def url(target: str, runtime: Client, tokenizer: Any) -> Iterator[str]:
    with gateway_for(target, tokenizer=tokenizer) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def post(http: httpx2.Client, path: str, said: list[Any], **more: Any) -> Any:
    where = {"input": said} if path == RESPONSES else {"messages": said}
    most = {"max_output_tokens": 60, "store": False} if path == RESPONSES else {"max_tokens": 60}
    reply = http.post(path, json={"model": "tiny", **where, **most, **more})
    assert reply.status_code == 200, reply.text
    return reply


def events(reply: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def history(runtime: Client, tokenizer: Any) -> str:
    (session,) = runtime.sessions()
    ids = [token_id for piece in runtime.session(session.id).history() for token_id in piece.token_ids]
    return str(tokenizer.decode(ids))


ASKED = {"role": "user", "content": "Why?"}


def whole(path: str, reply: Any) -> tuple[str, str, list[Any]]:
    """Its reasoning, its text, and what a client sends back of it."""
    if path == CHAT:
        message = reply["choices"][0]["message"]
        return message["reasoning_content"], message["content"], [message]
    if path == MESSAGES:
        thought, said = reply["content"]
        return thought["thinking"], said["text"], [{"role": "assistant", "content": reply["content"]}]
    thought, said = reply["output"]
    return thought["content"][0]["text"], said["content"][0]["text"], [thought, said]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_reasoning_stands_in_its_own_place_whole_and_streamed_and_the_session_goes_on_with_or_without_it(
    path: str, http: httpx2.Client, runtime: Client, tokenizer: Any, template: str
) -> None:
    reply = post(http, path, [ASKED]).json()
    thought, text, back = whole(path, reply)
    assert set(thought) <= {"a", "b"} and set(text) <= {"c", "d"} and len(thought) == len(text) == 3
    streamed = events(post(http, path, [ASKED], stream=True))
    if path == CHAT:
        deltas = [each["choices"][0]["delta"] for each in streamed if each["choices"]]
        assert "".join(each.get("reasoning_content", "") for each in deltas) == thought
        assert "".join(each.get("content", "") for each in deltas) == text
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
        without = [{"role": "assistant", "content": text}]
    elif path == MESSAGES:
        deltas = [each["delta"] for each in streamed if each["type"] == "content_block_delta"]
        assert "".join(each.get("thinking", "") for each in deltas) == thought
        assert "".join(each.get("text", "") for each in deltas) == text
        without = [{"role": "assistant", "content": text}]
    else:
        parts = {
            kind: [each for each in streamed if each["type"] == f"response.{kind}"]
            for kind in ("reasoning_text.delta", "reasoning_text.done", "output_text.delta", "output_text.done")
        }
        assert "".join(each["delta"] for each in parts["reasoning_text.delta"]) == thought
        assert [each["text"] for each in parts["reasoning_text.done"]] == [thought]
        assert "".join(each["delta"] for each in parts["output_text.delta"]) == text
        assert streamed[-1]["response"]["output"][0]["type"] == "reasoning"
        without = [reply["output"][1]]
    before = history(runtime, tokenizer)
    for said in (back, without):  # known by what was said: the ids that were generated stay
        post(http, path, [ASKED, *said, ASKED])
        assert history(runtime, tokenizer).startswith(before)


def limited(path: str, effort: str) -> dict[str, Any]:
    if path == CHAT:
        return {"reasoning_effort": effort, "max_tokens": 300}
    if path == RESPONSES:
        return {"reasoning": {"effort": effort}, "max_output_tokens": 300}
    thinking = {"type": "disabled"} if effort == "none" else {"type": "enabled", "budget_tokens": 128}
    return {"thinking": thinking, "max_tokens": 300}


@pytest.mark.parametrize("source", [TEMPLATE, OPENED], ids=["marked", "opened by the prompt"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_reasoning_ends_where_its_budget_does_and_the_answer_goes_on_behind_it(
    path: str, source: str, target: str, runtime: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model thinks without an end, and answers with three letters, if it is let."""
    tokenizer, generate, most = tiny_tokenizer(), AsyncSession.generate, list[int]()
    constraints: list[Any] = []
    tokenizer.chat_template = source

    def endless(session: AsyncSession, *given: Any, **options: Any) -> Any:
        most.append(given[0])
        constraints.append(options.get("constraint"))
        held = "[ab]{400}" if "stop_sequences" in options else "[cd]{3}"
        return generate(session, *given, **{**options, "constraint": Regex(held)})

    monkeypatch.setattr(AsyncSession, "generate", endless)
    with gateway_for(target, tokenizer=tokenizer) as url, httpx2.Client(base_url=url, timeout=60) as http:
        thought, text, back = whole(path, post(http, path, [ASKED], **limited(path, "minimal")).json())
        before = history(runtime, tokenizer)
        streamed = post(http, path, [ASKED], stream=True, **limited(path, "minimal")).text
        post(http, path, [ASKED, *back, ASKED], **limited(path, "none"))
        answered = history(runtime, tokenizer)
        if path == CHAT:
            post(http, path, [ASKED], response_format={"type": "json_object"}, **limited(path, "minimal"))
            assert [each is None for each in constraints[-2:]] == [True, False]
            if source == OPENED:  # without a budget as well: what is thought has no format
                cut = {"response_format": {"type": "json_object"}, "max_tokens": 40}
                assert post(http, path, [ASKED], **cut).json()["choices"][0]["finish_reason"] == "length"
                assert constraints[-1] is None
    assert set(thought) <= {"a", "b"} and len(thought) == 128
    assert set(text) <= {"c", "d"} and len(text) == 3
    assert before.endswith(f"{thought}</think>\n\n{text}") and most[:2] == [128, 300 - 128 - 10]
    assert streamed.count("data: {") > len(thought)  # it comes while it is thought
    # Without reasoning: an empty one stands before the answer.
    assert answered.startswith(before) and answered[:-3].endswith("assistant\n<think>\n\n</think>\n\n")


def test_reasoning_of_others_is_the_templates_to_show(http: httpx2.Client, runtime: Client, tokenizer: Any) -> None:
    earlier = {"role": "assistant", "content": "so", "reasoning_content": "since"}
    post(http, CHAT, [ASKED, earlier, ASKED])
    assert "<think>\nsince\n</think>\n\nso" in history(runtime, tokenizer)


def test_the_published_client_reads_reasoning_items(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="tiny", input="Why?", max_output_tokens=60)
        assert [each.type for each in first.output] == ["reasoning", "message"]
        back: Any = [{"role": "user", "content": "Why?"}, *first.output, {"role": "user", "content": "So?"}]
        again = client.responses.create(model="tiny", input=back, max_output_tokens=60)
        assert again.usage is not None and first.usage is not None
        assert again.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
        with client.responses.stream(model="tiny", input="Why?", max_output_tokens=60) as stream:
            kinds = {event.type for event in stream}
        assert {"response.reasoning_text.delta", "response.output_text.delta"} <= kinds


CUT: list[tuple[str, bool, bool, tuple[str, str]]] = [
    ("<think>\n a < b </think>\n\n<think> again", True, False, ("a < b", "<think> again")),
    (" a </think>b", True, True, ("a", "b")),
    ("  <thin", True, False, ("", "  <thin")),
    ("no <think>a</think>", True, False, ("", "no <think>a</think>")),
    ("<think>a</think>b", False, False, ("", "<think>a</think>b")),
    ("<think>a, and </thi", True, False, ("a, and </thi", "")),
    ("<think></think>\n b", True, False, ("", "b")),
]


def test_reasoning_comes_apart_however_tokens_cut_the_text(subtests: pytest.Subtests) -> None:
    for text, is_known, is_open, expected in CUT:
        for size in (1, 2, 3, len(text)):
            with subtests.test(f"{text} by {size}"):
                thoughts = Thoughts(is_known=is_known, is_open=is_open)
                found = {True: "", False: ""}
                for at in range(0, len(text), size):
                    for is_reasoning, said in thoughts.push(text[at : at + size]):
                        found[is_reasoning] += said
                for is_reasoning, said in thoughts.end():
                    found[is_reasoning] += said
                assert (found[True], found[False]) == expected
