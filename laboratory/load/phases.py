"""The same load once, twice, five times over … on one server, one after another, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference_engine.errors import ConfigError
from kakeya import AsyncClient, ServerInfo, Strategy
from laboratory.load.driver import Driver, Phase
from laboratory.load.samples import Samples
from laboratory.load.schedule import Agent, Shape, schedule

_CROWD = 0.5  # of all agents, the share of the first owner where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """agents: at any time, under a load of 1. seconds: of each phase, the first `warm_seconds` not counted."""

    shape: Shape
    agents: int
    loads: tuple[float, ...]
    seconds: float
    warm_seconds: float
    seed: int
    strategy: Strategy | None = None
    limit_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.agents < 1:
            raise ConfigError(f"agents must be at least 1, got {self.agents}")
        if not self.loads or any(load <= 0 for load in self.loads):
            raise ConfigError(f"loads must be above 0, got {self.loads}")
        if not 0 <= self.warm_seconds < self.seconds:
            raise ConfigError(f"warm_seconds must be from 0 to the phase's {self.seconds:g}, got {self.warm_seconds:g}")


@dataclass(frozen=True, slots=True)
class Part:
    """What one owner asked for and received, in tokens a second. fair: of all that was received, as much as it asked
    for, or as much as any other (max-min fairness).

    Tokens of turns from before the warm-up's end are received, and were not asked for after it: what is received was
    asked for at least.
    """

    asked: float
    received: float
    fair: float


@dataclass(frozen=True, slots=True)
class Played:
    load: float
    agents: int
    seconds: float  # counted ones
    samples: Samples
    parts: tuple[Part, ...] = ()  # of each owner


async def play(plan: Plan, client: AsyncClient, *others: AsyncClient) -> tuple[ServerInfo, Sequence[Played]]:
    """Every phase of `plan` on the client's server. others: clients of other owners, who share half of the agents."""
    played = []
    server = await client.server_info()
    for load in plan.loads:
        agents = max(1, round(plan.agents * load))
        phase = Phase(
            seconds=plan.seconds,
            warm_seconds=plan.warm_seconds,
            strategy=plan.strategy,
            limit_tokens=plan.limit_tokens,
            vocab_size=server.vocab_size,
        )
        every = schedule(plan.shape, agents=agents, seconds=plan.seconds, seed=plan.seed)
        crews = crews_of(every, agents, 1 + len(others))
        found = await asyncio.gather(
            *(Driver(one, phase).run(crew) for one, crew in zip((client, *others), crews, strict=True))
        )
        seconds = plan.seconds - plan.warm_seconds
        parts = fair_parts(
            [_asked(crew, plan) for crew in crews], [sum(one.goodput(seconds)) for one in found], seconds
        )
        played.append(Played(load, agents, seconds, Samples.together(found), parts))
    return server, played


def crews_of(every: Iterable[Agent], agents: int, owners: int) -> list[list[Agent]]:
    """The agents of each owner: the first has a crowd of them, the others as many each as the next."""
    crews: list[list[Agent]] = [[] for _ in range(owners)]
    crowd = agents if owners == 1 else round(_CROWD * agents)
    for agent in every:
        slot = agent.number % agents
        crews[0 if slot < crowd else 1 + slot % (owners - 1)].append(agent)
    return crews


def _asked(crew: Iterable[Agent], plan: Plan) -> float:
    """Tokens of turns that are due after the warm-up."""
    turns = [turn for agent in crew for turn in agent.turns if turn.due_seconds >= plan.warm_seconds]
    return float(sum(turn.generate_tokens for turn in turns))


def fair_parts(asked: Sequence[float], received: Sequence[float], seconds: float) -> tuple[Part, ...]:
    """Of the owners' tokens in so many seconds."""
    asked = [max(tokens) for tokens in zip(asked, received, strict=True)]
    fair, left = [0.0] * len(asked), sum(received)
    for place, owner in enumerate(sorted(range(len(asked)), key=lambda owner: asked[owner])):
        fair[owner] = min(asked[owner], left / (len(asked) - place))
        left -= fair[owner]
    return tuple(
        Part(*(tokens / seconds for tokens in of_owner)) for of_owner in zip(asked, received, fair, strict=True)
    )
