"""Sessions found again by their id or in a list, and histories read back, over both clients and the real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kakeya
from inference_engine.config import ServerConfig

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


async def collected(items: Any) -> list[Any]:
    """All of a blocking client's iterator, or of an asyncio client's."""
    if hasattr(items, "__anext__"):
        return [item async for item in items]
    return await asyncio.to_thread(list, items)


async def test_a_session_goes_on_where_its_id_is_known(client: Any, server_target: str, flavour: str, do: Do) -> None:
    strategy = kakeya.SinkWindow(sink=4, window=32)
    made = await do(client.create_session, strategy, label="lost", eos_token_ids=[127])
    await do(made.append, PROMPT)
    first = await do(made.generate(5).result)
    other: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(server_target)
    again = await do(other.session, made.id)
    names = "id strategy sustained_bytes peak_bytes tier_bytes limit_tokens mode model_id durability history_length"
    for name in names.split():
        assert getattr(again, name) == getattr(made, name), name
    assert again.history_length == 13
    assert await do(again.append, PROMPT) == 21
    second = await do(again.generate(5).result)
    fork = await do(again.fork)
    assert fork.id.partition(".")[0] == made.id.partition(".")[0]
    pieces = await collected(fork.history())
    assert [token for piece in pieces for token in piece.token_ids] == [
        *PROMPT,
        *first.token_ids,
        *PROMPT,
        *second.token_ids,
    ]
    assert [piece.run_lengths for piece in pieces] == [(8, 5, 8, 5)]
    assert await do(fork.close) == await do(again.close) == 26
    with pytest.raises(kakeya.SessionNotFound):
        await do(other.session, made.id)
    await do(other.close)


async def test_a_history_comes_in_pieces_of_a_bounded_size_from_any_position(session: Any, do: Do) -> None:
    assert await collected(session.history()) == []
    ids = [(7 * position) % 128 for position in range(50)]
    await do(session.append, ids)
    ids += (await do(session.generate(9).result)).token_ids
    for first, size in ((0, 16_384), (0, 1), (13, 20), (58, 7), (59, 7)):
        pieces = await collected(session.history(first_position=first, piece_tokens=size))
        assert [token for piece in pieces for token in piece.token_ids] == ids[first:]
        at = first
        for piece in pieces:
            assert (piece.first_position, piece.history_length) == (at, 59)
            assert 0 < len(piece.token_ids) <= size
            assert sum(piece.run_lengths) == len(piece.token_ids)
            at += len(piece.token_ids)
    with pytest.raises(kakeya.InvalidArgument) as caught:
        await collected(session.history(first_position=60))
    assert caught.value.field == "first_position"


@pytest.fixture
async def two_owners(run_server: Callable[..., Any], tmp_path: Path, flavour: str) -> AsyncIterator[tuple[Any, Any]]:
    keys = {"alice": "a" * 32, "bob": "b" * 32}
    file = tmp_path / "keys"
    file.write_text("".join(f"{key}\n" for key in keys.values()))
    kind: Any = kakeya.Client if flavour == "threads" else kakeya.AsyncClient
    with ExitStack() as stack:
        config = ServerConfig(bind="127.0.0.1:0", drain_seconds=1.0, api_key_file=str(file))
        target = await asyncio.to_thread(stack.enter_context, run_server(config))
        yield kind(target, api_key=keys["alice"]), kind(target, api_key=keys["bob"])


async def test_an_owner_lists_all_sessions_of_its_own_and_no_other(two_owners: tuple[Any, Any], do: Do) -> None:
    alice, bob = two_owners
    theirs = await do(bob.create_session)
    made = [await do(alice.create_session, label=f"turn {number}") for number in range(7)]
    await do(made[3].append, PROMPT)
    assert (await do(made[3].generate(2).result)).history_length == 10
    for size in (1, 3, 7, 1000):
        listed = {one.id: one for one in await collected(alice.sessions(page_size=size))}
        assert {one.id: one.label for one in listed.values()} == {
            session.id: f"turn {number}" for number, session in enumerate(made)
        }
        found = listed[made[3].id]
        assert (found.history_length, found.is_resident, found.is_generating) == (10, True, False)
        assert found.age_seconds >= 0 and found.idle_seconds >= 0 and found.strategy == made[3].strategy
    assert [one.id for one in await collected(bob.sessions())] == [theirs.id]
    with pytest.raises(kakeya.SessionNotFound):
        await do(alice.session, theirs.id)
    for closed in (alice, bob):
        await do(closed.close)
