"""Chat completions as the `openai` client asks for them, against what a session over gRPC says to the same ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from inference_engine.engine import Engine
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.run import ServerHandle
from tests.further import FURTHER
from tests.server.http.client import MESSAGES, left_nothing, openai_client, over_grpc, serving_http
from tests.tiny_folder import END, tiny_tokenizer
from tests.tiny_native import served_engine

CONVERSATIONS: Any = [
    MESSAGES,
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    [*MESSAGES, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": [{"type": "text", "text": "Go"}]}],
]
DRAWS: Any = [
    {},
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.5, "top_p": 0.6, "seed": 2**63},
    {"temperature": 0.7, "seed": 1, "logit_bias": {"10": -100, "98": 2.5}},
]
TOKENS = 24


@pytest.fixture
async def server(engine: Engine, chat: ChatText) -> AsyncIterator[ServerHandle]:
    async with serving_http(engine, chat) as handle:
        yield handle
        # Whatever a test asked for, nothing of it is left.
        assert await left_nothing(engine)


def on_the_wire(draw: dict[str, Any]) -> dict[str, Any]:
    """The same parameters as gRPC has them."""
    bias = {int(token): value for token, value in draw.get("logit_bias", {}).items()}
    return {**draw, **({"logit_bias": bias} if bias else {})}


def shown(token_ids: list[int]) -> str:
    return str(tiny_tokenizer().decode(token_ids, skip_special_tokens=True))


@pytest.mark.parametrize(
    ("draw", "messages"),
    [
        pytest.param(draw, messages, id=f"{name}-{said}", marks=() if place % len(CONVERSATIONS) == number else FURTHER)
        for place, (name, draw) in enumerate(zip(("default", "greedy", "seeded", "top_p", "bias"), DRAWS, strict=True))
        for number, (said, messages) in enumerate(zip(("one", "system", "parts"), CONVERSATIONS, strict=True))
    ],
)
async def test_an_answer_is_that_of_a_session_with_the_rendered_ids(
    server: ServerHandle, client: openai.AsyncOpenAI, messages: Any, draw: dict[str, Any]
) -> None:
    plain = [{**m, "content": m["content"] if isinstance(m["content"], str) else "Go"} for m in messages]
    token_ids, logprobs, done = await over_grpc(server, plain, TOKENS, **on_the_wire(draw))
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=TOKENS, logprobs=True, **draw
    )
    choice = answer.choices[0]
    said = token_ids[:-1] if choice.finish_reason == "stop" else token_ids
    assert choice.message.content == shown(said)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    # Logprobs distinguish tokens that have no text.
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(logprobs[: len(said)], abs=1e-5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(token_ids)
    assert answer.usage.prompt_tokens == done.history_length - len(token_ids)


@pytest.mark.parametrize("draw", DRAWS[1:3], ids=["greedy", "seeded"])
async def test_a_stream_says_what_the_whole_answer_says(client: openai.AsyncOpenAI, draw: dict[str, Any]) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, "logprobs": True, **draw}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].id != whole.id


async def test_a_stream_reports_its_usage_only_if_asked(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_stop_string_ends_the_answer_before_it_wherever_tokens_cut_it(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    text = (await client.chat.completions.create(**asked)).choices[0].message.content
    assert text is not None
    stop = text[4:7]
    before = text[: text.index(stop)]
    whole = await client.chat.completions.create(**asked, stop=["never said", stop])
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (before, "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens < TOKENS
    stream = await client.chat.completions.create(**asked, stop=stop, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == before
    assert choices[-1].finish_reason == "stop"


async def test_a_stop_string_that_is_a_token_of_its_own_ends_the_answer(client: openai.AsyncOpenAI) -> None:
    start = "<|im_start|>"
    bias = {str(tiny_tokenizer().convert_tokens_to_ids(start)): 1000}
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, logit_bias=bias, stop=start
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ""
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


async def test_the_end_of_the_turn_ends_the_answer_and_is_not_shown(client: openai.AsyncOpenAI) -> None:
    bias = {str(tiny_tokenizer().convert_tokens_to_ids(END)): 1000}
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, logit_bias=bias, logprobs=True
    )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "")
    assert choice.logprobs is not None
    assert choice.logprobs.content == []
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


async def test_without_a_number_of_tokens_an_answer_fills_the_models_length(client: openai.AsyncOpenAI) -> None:
    ends = {str(tiny_tokenizer().convert_tokens_to_ids(END)): -1000}
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logit_bias=ends)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


async def test_parameters_that_ask_for_what_happens_anyway_are_taken(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=2,
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        response_format={"type": "text"},
        store=False,
        tools=[],
        extra_body={"functions": None},
    )
    assert answer.choices[0].finish_reason == "length"


async def test_the_served_model_is_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["tiny"]


async def test_an_answer_says_how_much_of_the_conversation_it_could_not_read(chat: ChatText) -> None:
    with served_engine(strategy="sink_window:sink=4,window=16") as engine:
        async with serving_http(engine, chat) as handle, openai_client(handle) as client:
            long: Any = [{"role": "user", "content": "word " * 40}]
            _, _, done = await over_grpc(handle, long, 1)
            asked: Any = {"model": "tiny", "messages": long, "max_tokens": 1}
            whole = (await client.chat.completions.create(**asked)).model_dump()
            stream = await client.chat.completions.create(**asked, stream=True)
            last = [chunk.model_dump() async for chunk in stream][-1]
    assert done.evicted_position_count > 0
    assert whole["kakeya"] == last["kakeya"] == {"dropped_tokens": done.evicted_position_count}
