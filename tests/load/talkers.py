"""Clients for hours: each holds one session after another over gRPC and compares every token with the closed form.

Some leave in the middle of a stream, as clients do that crash; the session goes on from what it has then.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from inference_engine.backends.scripted import ScriptedModel
from kakeya import AsyncClient, AsyncSession, Full, RetryableError, SinkWindow, Strategy
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


async def talk(target: str, counts: Counts, *, model: ScriptedModel, segment: int, talkers: int, seed: int) -> None:
    """Until cancelled. Any error but a refusal is raised."""
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for number in range(talkers):
            group.create_task(_talk(client, counts, model, segment, random.Random(f"{seed} {number}")))


async def _talk(client: AsyncClient, counts: Counts, model: ScriptedModel, segment: int, rng: random.Random) -> None:
    kinds: tuple[tuple[Strategy, Sight], ...] = (
        (Full(), Sight()),
        (SinkWindow(sink=SINK, window=WINDOW), Sight(SINK, WINDOW)),
    )
    while True:
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
            while len(history) < FULL_AT:
                await _turn(session, history, solo, counts, rng)
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
