"""The same load once, twice, five times over … on one server, one after another, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_engine.errors import ConfigError
from kakeya import AsyncClient, ServerInfo, Strategy
from laboratory.load.driver import Driver, Phase
from laboratory.load.samples import Samples
from laboratory.load.schedule import Shape, schedule


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
class Played:
    load: float
    agents: int
    seconds: float  # counted ones
    samples: Samples


async def play(plan: Plan, client: AsyncClient) -> tuple[ServerInfo, Sequence[Played]]:
    """Every phase of `plan` on the client's server."""
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
        samples = await Driver(client, phase).run(every)
        played.append(Played(load, agents, plan.seconds - plan.warm_seconds, samples))
    return server, played
