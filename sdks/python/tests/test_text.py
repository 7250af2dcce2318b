"""A Generate read as text, from the real server: stop strings, whole characters, and where to go back to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import kakeya

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92]
SAID = "Well: naïve 😀.\nUser: me"
# Ids of the small vocabulary that stand for bytes above it.
HIGH = dict(enumerate("ï😀".encode(), start=1))
IDS = {byte: token for token, byte in HIGH.items()}


def encoded(text: str) -> list[int]:
    return [IDS.get(byte, byte) for byte in text.encode()]


class Bytes:
    """A tokenizer of one id a byte. Of the vocabulary it is tried with, 0 is special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **_: Any) -> str:
        kept = [HIGH.get(token, token) for token in token_ids if token or not skip_special_tokens]
        return bytes(kept).decode(errors="replace")


@pytest.fixture
async def session(client: Any, do: Do) -> Any:
    made = await do(client.create_session, eos_token_ids=[])
    await do(made.append, PROMPT)
    return made


def generating(session: Any) -> Any:
    """A Generate whose tokens are known."""
    return session.generate(64, constraint=kakeya.Choice([encoded(SAID)]))


async def pieces(stream: Any, flavour: str) -> list[str]:
    return [piece async for piece in stream] if flavour == "asyncio" else await asyncio.to_thread(list, stream)


async def test_text_comes_in_whole_characters_and_the_result_has_all_of_it(session: Any, do: Do, flavour: str) -> None:
    stream = generating(session)
    found = await pieces(stream.text(Bytes()), flavour)
    assert found == list(SAID)
    result = await do(generating(session).text(Bytes(), stop=["nowhere"]).result)
    assert (result.text, result.stop, result.token_ids) == (SAID, None, tuple(encoded(SAID)))
    assert result.position == result.result.history_length == session.history_length
    with pytest.raises(kakeya.StateError):
        await pieces(stream.text(Bytes()), flavour)


@pytest.mark.parametrize(("stop", "text", "matched"), [
    (["\nUser:", "nowhere"], "Well: naïve 😀.", "\nUser:"),
    (["ïv", "ï"], "Well: na", "ï"),
    (["W"], "", "W"),
])  # fmt: skip
async def test_a_stop_string_ends_the_text_and_a_rewind_takes_it_out_of_the_history(
    session: Any, do: Do, flavour: str, stop: list[str], text: str, matched: str
) -> None:
    found = await pieces(generating(session).text(Bytes(), stop=stop), flavour)
    assert "".join(found) == text
    result = await do(generating(await do(session.fork, at_position=len(PROMPT))).text(Bytes(), stop=stop).result)
    assert (result.text, result.stop, result.result) == (text, matched, None)
    assert result.position == len(PROMPT) + len(text.encode())
    assert list(result.token_ids[: result.position - len(PROMPT)]) == encoded(text)
    back = await do(session.rewind, result.position)
    assert back.history_length == result.position


async def test_a_stop_string_within_the_minimum_of_tokens_does_not_count(session: Any, do: Do) -> None:
    stream = session.generate(64, constraint=kakeya.Choice([encoded(SAID)]), min_tokens=2)
    result = await do(stream.text(Bytes(), stop=["e", "We"]).result)
    assert (result.text, result.stop) == ("Well: naïv", "e")


async def test_what_waits_for_a_stop_string_comes_with_the_end(session: Any, do: Do, flavour: str) -> None:
    found = await pieces(generating(session).text(Bytes(), stop=[": me and you"]), flavour)
    assert "".join(found) == SAID and found[-1] == ": me"


async def test_stops_that_are_no_texts_are_refused_by_name(session: Any) -> None:
    stream = session.generate(1)
    for wrong in ("text", [""], [3]):
        with pytest.raises(kakeya.InvalidArgument, match="stop"):
            stream.text(Bytes(), stop=wrong)
    stream.cancel()


async def test_stop_sequences_end_a_generate_and_the_result_says_which(session: Any, do: Do) -> None:
    generate = session.generate(64, constraint=kakeya.Choice([encoded(SAID)]), stop_sequences=[[9, 9], list(b"l:")])
    result = await do(generate.result)
    assert (bytes(result.token_ids), result.stop_reason, result.stop_sequence) == (b"Well:", kakeya.StopReason.EOS, 1)
    assert result.fits_constraint is False
    wrongs: list[list[list[int]]] = [[[]], [[2] * 600, [3] * 600]]
    for wrong in wrongs:
        with pytest.raises(kakeya.InvalidArgument, match="stop_sequences"):
            await do(session.generate(4, stop_sequences=wrong).result)
