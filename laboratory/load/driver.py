"""Plays a schedule against a server through the SDK, each agent a task of its own.

Nothing is retried: a turn that is refused is over, and the agent waits for its next one. Its session stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import kakeya
from kakeya import AsyncClient, AsyncSession, RetryPolicy, Strategy
from laboratory.load.samples import Samples
from laboratory.load.schedule import Agent, Turn

# Refusals are counted, not waited out.
NO_RETRIES = RetryPolicy(attempts=1)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of time under one load. Turns that are due in its first `warm_seconds` are played and not counted, but
    for what they have of goodput later."""

    seconds: float
    warm_seconds: float
    strategy: Strategy | None
    limit_tokens: int | None
    vocab_size: int


class Driver:
    """One phase on one client."""

    def __init__(self, client: AsyncClient, phase: Phase) -> None:
        self._client = client
        self._phase = phase
        self._loop = asyncio.get_running_loop()
        self._began = 0.0
        self.samples = Samples()

    async def run(self, agents: Iterable[Agent]) -> Samples:
        """Plays to the end of the phase; turns that began are waited for as long as their deadline allows."""
        self._began = self._loop.time()
        await asyncio.gather(*(self._play(agent) for agent in agents))
        return self.samples

    async def _play(self, agent: Agent) -> None:
        ids = random.Random(agent.number)
        session: AsyncSession | None = None
        try:
            for turn in agent.turns:
                await self._until(turn.due_seconds)
                session = await self._turn(session, turn, ids)
        finally:
            if session is not None:
                with contextlib.suppress(kakeya.KakeyaError):
                    await session.close()

    async def _turn(self, session: AsyncSession | None, turn: Turn, ids: random.Random) -> AsyncSession | None:
        """Play a turn. Returns the session to go on with: a new one if there was none, none if it is lost."""
        counts = turn.due_seconds >= self._phase.warm_seconds
        seen = Samples()
        began = self._now()
        seen.behind.append(began - turn.due_seconds)
        try:
            if session is None:
                session = await self._client.create_session(
                    self._phase.strategy, eos_token_ids=(), limit_tokens=self._phase.limit_tokens, label="load"
                )
            appended = [ids.randrange(self._phase.vocab_size) for _ in range(turn.append_tokens)]
            await session.append(appended)
            began = self._now()
            if turn.is_forked:
                await self._try_on_fork(session, turn, seen)
                began = self._now()
            await self._generate(session, turn, seen, began)
        except kakeya.RetryableError as error:
            seen.refused[_name(error)] += 1
            seen.refusal.append(self._now() - began)
        except (kakeya.HistoryLimit, kakeya.SessionNotFound) as error:
            seen.refused[_name(error)] += 1
            seen.refusal.append(self._now() - began)
            session = None
        except kakeya.KakeyaError as error:
            seen.failed[_name(error)] += 1
        if seen.finished:
            # Whenever the turn was due: a server with a queue spends the beginning of a phase on turns from before it.
            self.samples.tokens_by_second += seen.tokens_by_second
        if counts:
            self._count(turn, seen)
        return session

    async def _generate(self, session: AsyncSession, turn: Turn, seen: Samples, began: float) -> None:
        last: float | None = None
        tokens = 0
        async for _ in session.generate(turn.generate_tokens):
            now = self._now()
            if last is None:
                seen.first_token.append(now - turn.due_seconds)
                seen.first_token_asked.append(now - began)
            else:
                seen.gap.append(now - last)
            seen.tokens_by_second[math.floor(now - self._phase.warm_seconds)] += 1
            last, tokens = now, tokens + 1
        seen.turn.append(self._now() - turn.due_seconds)
        seen.finished += 1

    async def _try_on_fork(self, session: AsyncSession, turn: Turn, seen: Samples) -> None:
        """An agent that looks ahead: the same turn on a fork, which is thrown away."""
        began = self._now()
        async with await session.fork() as fork:
            seen.fork.append(self._now() - began)
            await fork.generate(turn.generate_tokens).result()

    def _count(self, turn: Turn, seen: Samples) -> None:
        into = self.samples
        into.due += 1
        into.finished += seen.finished
        into.refused += seen.refused
        into.failed += seen.failed
        for name in ("first_token", "first_token_asked", "behind", "gap", "turn", "refusal", "fork"):
            getattr(into, name).extend(getattr(seen, name))

    async def _until(self, due_seconds: float) -> None:
        if (wait := due_seconds - self._now()) > 0:
            await asyncio.sleep(wait)
            self.samples.late.append(self._now() - due_seconds)

    def _now(self) -> float:
        """Seconds since the phase began."""
        return self._loop.time() - self._began


def _name(error: kakeya.KakeyaError) -> str:
    return error.reason or error.code or type(error).__name__
