"""A budget for thinking, against the real server: what is in the history is exactly what was said and put in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import kakeya

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92]


async def ids_of(session: Any, do: Do) -> list[int]:
    """Its history, in one piece."""
    found = [piece async for piece in session.history()] if hasattr(session.history(), "__anext__") else None
    pieces = found if found is not None else await do(lambda: list(session.history()))
    return [token for piece in pieces for token in piece.token_ids]


async def opened(client: Any, do: Do) -> Any:
    session = await do(client.create_session, eos_token_ids=[])
    await do(session.append, PROMPT)
    return session


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_budget_ends_the_thinking_and_the_answer_goes_on_from_there(
    client: Any, do: Do, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 5}
    plain = (await do((await opened(client, do)).generate(12, **sampling).result)).token_ids
    for case, budget, end, thinking, appended in (
        ("ends by itself", 12, plain[3:6], plain[:6], ()),
        ("is cut", 6, (7, 8), plain[:6], (7, 8)),
        ("is cut within the marker", 6, (*plain[4:6], 9), plain[:6], (9,)),
    ):
        session = await opened(client, do)
        thought = await do(session.generate_thinking, budget, 4, end_token_ids=end, **sampling)
        answer = await do(thought.answer.result)
        assert (thought.thinking.token_ids, thought.appended_ids) == (thinking, appended), case
        assert await ids_of(session, do) == [*PROMPT, *thinking, *appended, *answer.token_ids]
        assert answer.seed == thought.thinking.seed and len(answer.token_ids) == 4


async def test_a_turn_that_ends_while_thinking_has_no_answer_and_a_constraint_is_for_the_answer(
    client: Any, do: Do
) -> None:
    plain = (await do((await opened(client, do)).generate(6).result)).token_ids
    session = await opened(client, do)
    over = await do(session.generate_thinking, 6, 4, end_token_ids=[7, 8], stop_token_ids=[plain[2]])
    assert over.answer is None and over.thinking.token_ids == plain[: plain.index(plain[2]) + 1]
    session = await opened(client, do)
    choice = kakeya.Choice([[70, 71]])
    thought = await do(session.generate_thinking, 4, 9, end_token_ids=[7, 8], constraint=choice, min_tokens=9)
    answer = await do(thought.answer.result)
    assert (answer.token_ids, answer.fits_constraint) == ((70, 71), True)
    with pytest.raises(kakeya.InvalidArgument, match="end_token_ids"):
        await do(session.generate_thinking, 4, 9, end_token_ids=[])
