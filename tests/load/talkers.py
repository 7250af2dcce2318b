"""Clients for hours: each holds one session after another over gRPC and compares every token with the closed form.

Some leave in the middle of a stream, as clients do that crash; the session goes on from what it has then.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from kakeya import AsyncClient, AsyncSession, Full, RetryableError, SinkWindow, Strategy
from laboratory.scripted import ScriptedModel
from tests.load.solo import Sight, Solo

LIMIT_TOKENS = 400
FULL_AT = 300
LEAVING_SHARE = 0.05
SINK, WINDOW = 4, 64


@dataclass
class Counts:
    turns: int = 0
    tokens: int = 0
    sessions: int = 0
    left: int = 0
    refused: int = 0
    wrong: int = 0


async def talk(
    target: str,
    counts: Counts,
    *,
    seconds: float,
    model: ScriptedModel,
    segment: int,
    talkers: int,
    seed: int,
    turn_seconds: float = 0.0,
) -> None:
    """For so long, and then each to the end of its turn, so that every session is closed. Errors but refusals raise.

    turn_seconds: a talker begins no two turns within such a time.
    """
    until = time.monotonic() + seconds
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for number in range(talkers):
            rng = random.Random(f"{seed} {number}")
            group.create_task(_talk(client, counts, model, segment, rng, until, turn_seconds))


async def _talk(
    client: AsyncClient,
    counts: Counts,
    model: ScriptedModel,
    segment: int,
    rng: random.Random,
    until: float,
    turn_seconds: float,
) -> None:
    kinds: tuple[tuple[Strategy, Sight], ...] = (
        (Full(), Sight()),
        (SinkWindow(sink=SINK, window=WINDOW), Sight(SINK, WINDOW)),
    )
    while time.monotonic() < until:
        strategy, sight = rng.choice(kinds)
        solo = Solo(model=model, sights=(sight,) * model.layers, segment=segment)
        try:
            session = await client.create_session(strategy, limit_tokens=LIMIT_TOKENS, label="soak")
        except RetryableError:
            counts.refused += 1
            await asyncio.sleep(0.1)
            continue
        async with session:
            history: list[int] = []
            while len(history) < FULL_AT and time.monotonic() < until:
                next_at = time.monotonic() + turn_seconds
                await _turn(session, history, solo, counts, rng)
                await asyncio.sleep(max(0.0, min(next_at, until) - time.monotonic()))
        counts.sessions += 1


async def _turn(session: AsyncSession, history: list[int], solo: Solo, counts: Counts, rng: random.Random) -> None:
    appended = [rng.randrange(solo.model.vocab_size) for _ in range(rng.randint(1, 20))]
    await session.append(appended)
    history += appended
    count = rng.randint(1, 8)
    leaves_after = rng.randint(1, count) if rng.random() < LEAVING_SHARE else None
    first = len(history)
    try:
        async with session.generate(count) as stream:
            async for token in stream:
                history.append(token)
                if len(history) - first == leaves_after:
                    break
    except RetryableError:
        counts.refused += 1
        return
    if leaves_after is not None:
        counts.left += 1
        info = await session.info()
        while info.is_generating:
            info = await session.info()
        history += solo.continued(history, info.history_length - len(history))
    # One comparison for all tokens: each must be what the history before it gives.
    if history[first:] and solo.tokens(history[:-1], first) != history[first:]:
        counts.wrong += 1
    counts.turns += 1
    counts.tokens += len(history) - first
