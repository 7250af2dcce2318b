"""Acceptance of a drafter with two methods is counted by method: one that fails does not shorten the other's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from inference_engine.decode.draft import CommittedTokens, DraftMethod, Tokens, Wanted
from inference_engine.decode.verifier import Block, Outcome
from inference_engine.kernels.sampling import Sample
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.request import Request
from inference_engine.scheduler.speculation import Drafting
from inference_engine.types import GenerateParams
from tests.laws.drafters import Plain, Remembering
from tests.tiny import tiny_engine

COPY, NETWORK = (
    DraftMethod("copy", longest=7, needs_entries=False),
    DraftMethod("network", longest=7, needs_entries=True),
)
STEP_SECONDS = 0.01
RIGHT, WRONG = 500, 900


class TwoWays(Plain):
    """Copies after even ids, a network after odd ones. `reported`: tokens it was given."""

    def __init__(self) -> None:
        super().__init__(longest=7)
        self.reported = 0

    def method(self, history: Tokens) -> DraftMethod | None:
        return NETWORK if history[-1] % 2 else COPY

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        self.reported += sum(len(one.token_ids) for one in seen)

    def draft_token(self, one: Wanted) -> list[int]:
        return [RIGHT] * one.limit


@dataclass(eq=False)
class Talk:
    """As much of a request and its session as drafting looks at."""

    ids: list[int] = field(default_factory=lambda: [0])
    generated: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    is_degraded: bool = False
    is_prefilling: bool = False
    is_closed: bool = False
    failure_reason: str | None = None
    longest: int | None = None
    forced: None = None
    seed: int = 0
    params: GenerateParams = field(default_factory=lambda: GenerateParams(max_tokens=10**6))
    trace: Any = field(default_factory=lambda: SimpleNamespace(note=lambda *_, **__: None))
    kv: Any = field(default_factory=lambda: SimpleNamespace(room=lambda: 100, most_rejected=99, draft_memory=object()))

    @property
    def session(self) -> Talk:
        return self

    @property
    def history(self) -> Any:
        return np.array(self.ids, dtype=np.uint32)


def step(drafting: Drafting, talk: Talk, last: int, right: int) -> int:
    """One step after the id `last`, of whose draft tokens the first `right` are right. Returns how many there were."""
    talk.ids.append(last)
    request = cast("Request", talk)
    draft = drafting.draft([request], 100).get(request, np.zeros(0, dtype=np.uint32))
    accepted = min(right, len(draft))
    block = Block(kv=talk.kv, token_ids=np.array([last, *draft], dtype=np.uint32), drafted=len(draft))
    said = [RIGHT] * accepted + [RIGHT if right and not len(draft) else WRONG]
    samples = tuple(Sample(token, None, is_finite=True) for token in said)
    drafting.took(1, 1 + len(draft), STEP_SECONDS * (1 + 0.02 * len(draft)))
    drafting.settle(request, block, Outcome(samples), first=len(talk.ids) - 1, kept=1 + accepted, taken=1 + accepted)
    drafting.flush_if_many()
    return len(draft)


def drafting_with(drafter: TwoWays) -> Drafting:
    clock = count()
    return Drafting(drafter, EngineMetrics(), lambda: next(clock) * 1e-6, vocab_size=1000, draft_tokens=0)


def test_a_drafter_that_proposes_nothing_yet_is_given_the_tokens() -> None:
    drafter = Remembering(longest=0)
    with tiny_engine(drafter=drafter) as engine:
        session = engine.create_session().session_id
        engine.append(session, [1, 2, 3])
        assert list(engine.generate(session, GenerateParams(max_tokens=40)))
        (memory,) = drafter.memories
        assert memory.tokens


def test_the_network_is_given_tokens_before_it_drafts_and_not_before_a_copy_is_taken() -> None:
    drafter = TwoWays()
    drafting, talk = drafting_with(drafter), Talk()
    for _ in range(3):
        step(drafting, talk, 0, right=0)
    assert drafter.reported == 0
    step(drafting, talk, 1, right=0)
    assert drafter.reported == 3


def test_a_drafter_that_cannot_say_how_it_would_draft_is_not_asked_again() -> None:
    class Speechless(TwoWays):
        def method(self, history: Tokens) -> DraftMethod | None:
            raise RuntimeError("the drafter cannot say")

    drafting, talk = drafting_with(Speechless()), Talk()
    talk.kv.draft_memory = None
    assert step(drafting, talk, 1, right=0) == 0
    assert talk.is_degraded
