"""Which session a request goes on with, whatever the API, and what that costs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kakeya import Client, Session
from kakeya.tokenization import tokens_for_chat, tokens_for_next_turn
from kakeya_gateway.conversations import shared
from tests.gateway.conftest import gateway_for
from tests.tiny import VOCABULARY
from tests.tiny_folder import CHARACTERS, tiny_tokenizer

SAMPLED: Any = {"model": "tiny", "temperature": 1.0, "seed": 5, "max_tokens": 10}
USERS = ("Hello", "And then?", "Go on.")


def said(role: str, content: str | None) -> Any:
    return {"role": role, "content": content}


def ask(client: openai.OpenAI, messages: list[Any], **parameters: Any) -> tuple[str, int, int]:
    """The answer, tokens of the prompt, and those of them that were cached."""
    reply = client.chat.completions.create(messages=messages, **{**SAMPLED, **parameters})
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    cached = reply.usage.prompt_tokens_details.cached_tokens
    return reply.choices[0].message.content or "", reply.usage.prompt_tokens, cached or 0


def talk(client: openai.OpenAI, users: tuple[str, ...] = USERS, **parameters: Any) -> list[Any]:
    messages: list[Any] = []
    for user in users:
        messages.append(said("user", user))
        messages.append(said("assistant", ask(client, messages, **parameters)[0]))
    return messages


def histories(runtime: Client) -> list[list[int]]:
    """Of all sessions, the longest first."""
    sessions = [runtime.session(each.id) for each in runtime.sessions()]
    return sorted(map(history, sessions), key=len, reverse=True)


def history(session: Session) -> list[int]:
    return [token_id for piece in session.history() for token_id in piece.token_ids]


def test_each_turn_computes_what_is_new_in_it(client: openai.OpenAI, runtime: Client) -> None:
    """And its answer is that of a session to which only that was appended: generated ids stay, text or no text."""
    messages: list[Any] = []
    with runtime.create_session() as plain:
        generated: tuple[int, ...] = ()
        for user in USERS:
            messages.append(said("user", user))
            if generated:
                new = tokens_for_next_turn(messages[-1:], tiny_tokenizer(), after=generated)
            else:
                new = tokens_for_chat(messages, tiny_tokenizer())
            before = plain.history_length
            plain.append(new)
            generated = plain.generate(10, temperature=1.0, seed=5).result().token_ids
            text, prompt_tokens, cached = ask(client, messages)
            assert text == tiny_tokenizer().decode(generated, skip_special_tokens=True)
            assert prompt_tokens == before + len(new)
            assert cached == max(0, before - 1)  # K/V of the last token drawn comes with the next step
            messages.append(said("assistant", text))
        assert histories(runtime) == [history(plain)] * 2
    ids = tokens_for_chat(messages, tiny_tokenizer(), add_generation_prompt=False)
    assert histories(runtime)[0] != ids[: len(histories(runtime)[0])], "rendered again, other ids would come"


def test_a_retry_and_another_last_message_rewind_the_session(client: openai.OpenAI, runtime: Client) -> None:
    messages = talk(client)
    _, prompt_tokens, cached = ask(client, messages[:-1], seed=6)
    assert cached == prompt_tokens - 1
    _, prompt_tokens, cached = ask(client, [*messages[:-2], said("user", "No.")])
    assert cached > prompt_tokens - 30
    assert len(histories(runtime)) == 1


def test_a_conversation_that_branches_off_earlier_leaves_the_longer_one_as_it_is(
    client: openai.OpenAI, runtime: Client
) -> None:
    messages = talk(client)
    (longer,) = histories(runtime)
    _, _, cached = ask(client, [*messages[:2], said("user", "Another way.")])
    assert cached > 30
    assert longer in histories(runtime)
    _, _, cached = ask(client, [*messages, said("user", "Further.")])
    assert cached >= len(longer) - 1
    assert len(histories(runtime)) == 2


def test_another_conversation_and_another_key_have_a_session_of_their_own(
    client: openai.OpenAI, url: str, runtime: Client
) -> None:
    messages = talk(client, USERS[:2])
    assert ask(client, [said("user", "Something else entirely, which is long enough")])[2] == 0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0) as other:
        assert ask(other, [*messages, said("user", "Go on.")])[2] == 0
    assert len(histories(runtime)) == 3


async def test_two_requests_on_one_conversation_at_once_both_get_their_answer(url: str, runtime: Client) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def answer(messages: list[Any], **parameters: Any) -> str:
            reply = await client.chat.completions.create(messages=messages, **{**SAMPLED, **parameters})
            return reply.choices[0].message.content or ""

        messages = [said("user", "Hello")]
        messages = [*messages, said("assistant", await answer(messages)), said("user", "Both of you")]
        together = await asyncio.gather(*(answer(messages, max_tokens=40) for _ in range(2)))
        assert together[0] == together[1]
    assert len(histories(runtime)) == 2


def test_sessions_are_held_up_to_a_limit_and_a_closed_one_is_made_again(target: str, runtime: Client) -> None:
    with (
        gateway_for(target, most=2) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        talks = [talk(client, (f"{number}: a conversation of its own",)) for number in range(4)]
        assert len(histories(runtime)) == 2
        for each in runtime.sessions():
            runtime.session(each.id).close()
        _, prompt_tokens, cached = ask(client, [*talks[-1], said("user", "Go on.")])
        assert (cached, len(histories(runtime)[0])) == (0, prompt_tokens + 10)


@pytest.fixture
def restarted(target: str, runtime: Client) -> Iterator[tuple[list[Any], str, openai.OpenAI]]:
    """A conversation and a response of one gateway, and a client of the next."""
    with gateway_for(target) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        # Ids that their text gives again: after a restart, text is what is known of a conversation.
        messages = talk(client, logit_bias={str(token): -100 for token in range(len(CHARACTERS), VOCABULARY)})
        response = client.responses.create(model="tiny", input="Hi", max_output_tokens=5)
    with gateway_for(target) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield messages, response.id, client


def test_the_next_gateway_goes_on_with_the_sessions_of_the_last(
    restarted: tuple[list[Any], str, openai.OpenAI],
) -> None:
    messages, response_id, client = restarted
    assert ask(client, [*messages, said("user", "Go on.")])[2] > 30
    after = client.responses.create(model="tiny", input="And?", max_output_tokens=5, previous_response_id=response_id)
    assert after.usage is not None
    assert after.usage.input_tokens_details.cached_tokens == 25  # 21 of the prompt and 5 of the answer, but its last
    with pytest.raises(openai.NotFoundError, match="earlier gateway"):
        client.responses.retrieve(response_id)


def test_how_far_two_histories_agree_is_found_wherever_they_part() -> None:
    one = array("I", range(50))
    for length in range(51):
        other = one[:length] + array("I", [99] * 3)
        assert shared(one, other) == shared(other, one) == length
        assert shared(one, one[:length]) == length
