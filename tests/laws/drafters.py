"""Drafters to hold the law of speculation against: one that is right, wrong ones, and one that breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from inference_engine.decode.draft import CommittedTokens, DraftMethod, TokenIds, Tokens, Wanted
from inference_engine.kv.context import DraftMemory, KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand
from tests.tiny import VOCABULARY

LONGEST = 5


@dataclass
class Plain:
    """Remembers nothing. `proposed` and `limits` say what it was asked."""

    name: str = "of a test"
    longest: int = LONGEST
    tap_layers: tuple[int, ...] = ()
    limits: list[int] = field(default_factory=list)

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext) -> Memory | None:
        return None

    def prepare(self, context: KVContext) -> None:
        pass

    def method(self, history: Tokens) -> DraftMethod | None:
        return DraftMethod(self.name, longest=self.longest, needs_entries=bool(self.tap_layers))

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        pass

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        self.limits += [one.limit for one in wanted]
        return [np.array(self.draft_token(one), dtype=np.uint32) for one in wanted]

    def draft_token(self, one: Wanted) -> list[int]:
        return []


class Wrong(Plain):
    """Hardly ever right."""

    def draft_token(self, one: Wanted) -> list[int]:
        last = int(one.history[-1])
        return [(last + 1 + step) % VOCABULARY for step in range(one.limit)]


@dataclass
class Knowing(Plain):
    """Knows what will be said, and errs in every `errs`-th place of the history."""

    text: Sequence[int] = ()
    errs: int = 10**9

    def draft_token(self, one: Wanted) -> list[int]:
        first = len(one.history)
        return [
            (token + (place % self.errs == 0)) % VOCABULARY
            for place, token in enumerate(self.text[first : first + one.limit], start=first)
        ]


@dataclass
class Failing(Plain):
    """Raises when it is asked for its `fails`-th draft, or given tokens the `deaf`-th time."""

    fails: int = 10**9
    deaf: int = 10**9
    answers: list[list[int]] | None = None  # to every question
    tap_layers: tuple[int, ...] = (1,)
    asked: int = 0
    reported: int = 0

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        self.reported += 1
        if self.reported >= self.deaf:
            raise RuntimeError("the drafter cannot observe")

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        if self.answers is not None:
            return [np.array(answer, dtype=np.uint32) for answer in self.answers]
        return super().propose(wanted)

    def draft_token(self, one: Wanted) -> list[int]:
        self.asked += 1
        if self.asked >= self.fails:
            raise RuntimeError("the drafter cannot propose")
        return [1] * one.limit


@dataclass
class Memory(DraftMemory):
    """Which tokens of a session were given, in order."""

    context: KVContext
    demand: Demand
    starts: tuple[int, ...]
    tokens: list[tuple[int, int]] = field(default_factory=list)  # position, token id
    taps: list[torch.Tensor] = field(default_factory=list)
    is_released: bool = False

    def held_bytes(self) -> int:
        return 8 * len(self.tokens)

    def clear(self) -> None:
        self.tokens.clear()
        self.taps.clear()

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self.context.pool.release((self.demand,), self.starts)


@dataclass
class Remembering(Plain):
    """Writes down every token it is given; drafts by their hidden states, which is to say at random."""

    tap_layers: tuple[int, ...] = (0, 2)
    memories: list[Memory] = field(default_factory=list)

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return (Demand.of(geometry, 4096),)

    def open(self, context: KVContext) -> Memory | None:
        demands = self.demands(context.geometry)
        starts = context.pool.reserve(demands)
        if starts is None:
            return None
        self.memories.append(Memory(context, demands[0], starts))
        return self.memories[-1]

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        for one in seen:
            assert isinstance(one.memory, Memory) and one.taps is not None
            assert one.taps.shape[:2] == (len(one.token_ids), len(self.tap_layers))
            for place, token in enumerate(one.token_ids.tolist()):
                one.memory.tokens.append((one.first + place, token))
            one.memory.taps.extend(one.taps)

    def draft_token(self, one: Wanted) -> list[int]:
        assert isinstance(one.memory, Memory)
        state = one.memory.taps[-1].double().sum().abs()
        return [int(state * (step + 1)) % VOCABULARY for step in range(one.limit)]
