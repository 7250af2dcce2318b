"""A drafter is given what the target will draw with: seed, temperature, and the places of its draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from inference_engine.decode.draft import Wanted
from inference_engine.engine import Engine
from inference_engine.kernels.gumbel_noise import key, noise_of_all
from inference_engine.types import Finished, GenerateParams, Mode, Sampling
from tests.further import further
from tests.laws.drafters import Plain
from tests.laws.variants import drain, engine_for, text, tokens
from tests.tiny import VOCABULARY, tiny_model

COUNT = 40


@dataclass
class Twin(Plain):
    """Is the target's equal: it runs the same model over the history and its own draft tokens, and draws as it does."""

    def draft_token(self, one: Wanted) -> list[int]:
        ids: list[int] = one.history[:].tolist()
        with torch.no_grad():
            while len(ids) < len(one.history) + one.limit:
                scores = tiny_model()(torch.tensor([ids])).logits[0, -1].double()
                if one.temperature:
                    keys = torch.tensor([key(one.seed, len(ids))])
                    scores = scores / one.temperature + noise_of_all(keys, VOCABULARY)[0]
                ids.append(int(scores.argmax()))
        return ids[len(one.history) :]


def said(engine: Engine, session_id: str, sampling: Sampling, *, count: int = COUNT) -> tuple[list[int], Finished]:
    events = drain(engine.generate(session_id, GenerateParams(max_tokens=count, sampling=sampling)))
    assert isinstance(events[-1], Finished)
    return [token for token, _ in tokens(events)], events[-1]


def opened(engine: Engine, ids: Sequence[int]) -> str:
    session_id = engine.create_session().session_id
    engine.append(session_id, list(ids))
    return session_id


@pytest.mark.parametrize(
    ("temperature", "seed"), [further(0.0, None), further(0.6, 0), (1.0, 2**64 - 1), further(3.0, None)]
)
def test_a_drafter_that_knows_the_targets_logits_is_never_wrong(temperature: float, seed: int | None) -> None:
    sampling = Sampling(temperature=temperature, seed=seed)
    with engine_for(Mode.BATCHED, drafter=Twin(), draft_tokens=4) as engine:
        session = opened(engine, text(30))
        first, done = said(engine, session, sampling)
        engine.append(session, text(5, seed=2))
        _, later = said(engine, session, sampling)
    for one in (done, later):
        assert one.accepted_tokens == one.drafted_tokens > COUNT // 2
    with engine_for(Mode.BATCHED) as engine:
        plain, _ = said(engine, opened(engine, text(30)), Sampling(temperature=temperature, seed=done.seed))
    assert plain == first
