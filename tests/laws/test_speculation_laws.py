"""The law of speculation, over every registered strategy and both modes: a drafter changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from inference_engine.backends.base import Step
from inference_engine.decode.draft import Drafter, Wanted
from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode, Sampling
from kv_cache_proposer.dflash.drafter import DFlashDrafter
from kv_cache_proposer.dflash.target import words_of
from kv_cache_proposer.eagle3.eagle3_drafter import Eagle3Drafter
from kv_cache_proposer.hybrid import HybridDrafter
from kv_cache_proposer.ngram import NgramDrafter
from tests.decode.plain_sampling import filtered_probabilities
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_eagle3, tiny_network
from tests.laws.drafters import Failing, Knowing, Plain, Remembering, Wrong
from tests.laws.variants import (
    LENGTH,
    MODES,
    all_strategies,
    drain,
    each_mode,
    each_strategy,
    each_strategy_with,
    engine_for,
    generate,
    same,
    text,
    tokens,
)
from tests.tiny import VOCABULARY, tiny_forward

GREEDY = Sampling()
PENALISED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.3, seed=7)
COUNT = 40
SEEDS = 400
FIRST = 8  # so that drafts lie across the boundary of a segment


def opened(engine: Engine, strategy: KVStrategy, history: list[int]) -> str:
    session_id = engine.create_session(strategy=strategy).session_id
    engine.append(session_id, history)
    return session_id


def ended(engine: Engine, session_id: str, params: GenerateParams) -> tuple[list[int], Finished]:
    events = drain(engine.generate(session_id, params))
    assert isinstance(events[-1], Finished)
    return [token for token, _ in tokens(events)], events[-1]


def drafters(said: list[int], place: int) -> Iterator[Drafter]:
    """One that is right and wrong by turns, for every strategy; and one of all others, by the strategy's place.

    What becomes of entries depends on how many draft tokens are kept, not on who drafted them.
    """
    yield Knowing(text=said, errs=7)
    words = words_of(tiny_forward().seam.model)
    networks = [DFlashDrafter(network, words) for network in (tiny_network(), chained_network())]
    hybrid = HybridDrafter(networks[0], NgramDrafter(min_ngram=1, max_ngram=2))
    eagle = Eagle3Drafter(tiny_eagle3(), words.embeddings, target_hidden=64)
    others: list[Drafter] = [Remembering(), eagle, NgramDrafter(min_ngram=1), *networks, hybrid]
    yield others[place % len(others)]


@each_strategy_with(mode=MODES)
def test_drafts_change_no_token_and_no_later_one(strategy: KVStrategy, mode: Mode) -> None:
    """Right and wrong draft tokens, segment boundaries among them; a second turn reads what the first one left."""
    sampling = GREEDY if mode is Mode.BATCHED else PENALISED
    with engine_for(mode) as engine:
        plain = opened(engine, strategy, text())
        first = generate(engine, plain, FIRST, sampling=sampling)
        engine.append(plain, text(20, seed=5))
        second = generate(engine, plain, 6, sampling=sampling)
    said = [*text(), *(token for token, _ in first), *text(20, seed=5), *(token for token, _ in second)]
    for drafter in drafters(said, all_strategies().index(strategy)):
        with engine_for(mode, drafter=drafter, draft_tokens=4) as engine:
            session = opened(engine, strategy, text())
            assert same(first, generate(engine, session, FIRST, sampling=sampling), mode), drafter
            engine.append(session, text(20, seed=5))
            assert same(second, generate(engine, session, 6, sampling=sampling), mode), drafter
            info = engine.session_info(session)
            assert info.kv_live_bytes <= info.bound.sustained_bytes


@each_mode
def test_a_right_draft_saves_steps_and_a_wrong_one_does_not(mode: Mode) -> None:
    """The off-switch, seen from the other side: drafting must show, or the law above holds for nothing."""
    with engine_for(mode) as engine:
        said = [*text(), *(token for token, _ in generate(engine, opened(engine, Full(), text()), COUNT))]
    params = GenerateParams(max_tokens=COUNT)
    with engine_for(mode, drafter=Knowing(text=said), draft_tokens=4) as engine:
        got, right = ended(engine, opened(engine, Full(), text()), params)
        steps = engine.metrics.registry.get_sample_value("kakeya_engine_step_tokens_count")
        _, off = ended(engine, opened(engine, Full(), text()), GenerateParams(max_tokens=COUNT, drafting=False))
    assert got == said[LENGTH:]
    assert right.accepted_tokens == right.drafted_tokens >= COUNT // 2
    assert steps is not None and steps < COUNT // 2
    assert (off.drafted_tokens, off.accepted_tokens) == (0, 0)
    with engine_for(mode, drafter=Wrong(), draft_tokens=4) as engine:
        got, wrong = ended(engine, opened(engine, Full(), text()), params)
    assert got == said[LENGTH:]
    assert wrong.drafted_tokens > 50 > wrong.accepted_tokens


@each_strategy
def test_a_drafter_sees_every_committed_token_once_and_in_order(strategy: KVStrategy) -> None:
    drafter = Remembering()
    with engine_for(Mode.BATCHED, drafter=drafter, draft_tokens=3) as engine:
        session = opened(engine, strategy, text())
        generate(engine, session, 21)
        engine.append(session, text(33, seed=2))
        generate(engine, session, 5)
        length = engine.session_info(session).history_length
        given = dict(drafter.memories[0].tokens)
        positions = [position for position, _ in drafter.memories[0].tokens]
        assert positions == sorted(set(positions))
        assert sorted(given) == list(range(length - 1))
        assert [given[position] for position in range(LENGTH)] == text()


def test_a_stop_id_within_a_draft_ends_the_stream_there() -> None:
    with engine_for(Mode.FIXED_SHAPE) as engine:
        said = [token for token, _ in generate(engine, opened(engine, Full(), text()), COUNT)]
    stop = next(token for place, token in enumerate(said) if place % 5 == 2 and token not in said[:place])
    params = GenerateParams(max_tokens=COUNT, stop_token_ids=(stop,))
    with engine_for(Mode.FIXED_SHAPE, drafter=Knowing(text=[*text(), *said]), draft_tokens=4) as engine:
        session = opened(engine, Full(), text())
        got, _ = ended(engine, session, params)
        assert got == said[: said.index(stop) + 1]
        assert engine.session_info(session).history_length == LENGTH + len(got)
        again, _ = ended(engine, session, GenerateParams(max_tokens=5))
    assert again == said[len(got) : len(got) + 5]


def test_a_draft_never_passes_max_tokens_the_limit_or_a_segment() -> None:
    drafter = Wrong()
    with engine_for(Mode.BATCHED, drafter=drafter, draft_tokens=LENGTH) as engine:
        session = engine.create_session(limit_tokens=LENGTH + 3).session_id
        engine.append(session, text())
        got, done = ended(engine, session, GenerateParams(max_tokens=50))
        assert len(got) == 3 and done.history_length == LENGTH + 3
        assert max(drafter.limits) <= 2
        windowed = opened(engine, SinkWindow(sink=2, window=16), text(31))
        got, _ = ended(engine, windowed, GenerateParams(max_tokens=4))
        assert len(got) == 4


@pytest.mark.parametrize(
    "drafter",
    [Failing(fails=3), Failing(deaf=1), Failing(deaf=4), Failing(answers=[]), Failing(answers=[[VOCABULARY]])],
    ids=str,
)
def test_a_drafter_that_fails_costs_nothing_but_its_drafts(drafter: Plain) -> None:
    with engine_for(Mode.FIXED_SHAPE) as engine:
        said = [token for token, _ in generate(engine, opened(engine, Full(), text()), COUNT)]
    with engine_for(Mode.FIXED_SHAPE, drafter=drafter, draft_tokens=2) as engine:
        got, done = ended(engine, opened(engine, Full(), text()), GenerateParams(max_tokens=COUNT))
        assert engine.metrics.registry.get_sample_value("kakeya_generate_drafter_failures_total") == 1
    assert got == said
    assert done.is_degraded


def test_a_drafters_memory_is_reserved_reported_and_given_back() -> None:
    drafter = Remembering()
    with engine_for(Mode.BATCHED, drafter=drafter) as engine, engine_for(Mode.BATCHED) as bare:
        with_memory, without = (one.create_session(strategy=SinkWindow(window=16)) for one in (engine, bare))
        assert with_memory.bound.sustained_bytes > without.bound.sustained_bytes
        assert engine.info().kv_reserved_bytes == with_memory.bound.peak_bytes
        engine.close_session(with_memory.session_id)
        assert engine.info().kv_reserved_bytes == 0


@dataclass
class Dear(Wrong):
    """Hardly ever right. The cost of tokens is counted, not measured: `seconds` is the time by then."""

    seconds: float = 0.0
    draft_token_seconds: float = 0.05

    def draft_token(self, one: Wanted) -> list[int]:
        self.seconds += one.limit * self.draft_token_seconds
        return super().draft_token(one)

    def on_step(self, step: Step) -> None:
        self.seconds += 1.0 + 0.1 * len(step.token_ids)


def test_drafts_that_never_pay_are_switched_off() -> None:
    """Adaptive length: each of a thousand plain steps costs less than a drafted one, so few are drafted."""
    drafter = Dear()
    with engine_for(Mode.BATCHED, drafter=drafter, on_step=drafter.on_step, clock=lambda: drafter.seconds) as engine:
        session = opened(engine, SinkWindow(sink=2, window=16), text(20))
        _, done = ended(engine, session, GenerateParams(max_tokens=600))
    assert 0 < done.drafted_tokens < 200  # of the 2,400 there would be with four draft tokens a token


def test_sampled_tokens_follow_the_targets_distribution_with_drafts() -> None:
    """Chi-square of what 400 seeds draw in the place of the second token, against the target's own softmax."""
    sampling = Sampling(temperature=1.5, top_k=12)
    history = text(40)
    with engine_for(Mode.BATCHED) as engine:
        greedy = generate(engine, opened(engine, Full(), history), 1)[0][0]
        logits: list[torch.Tensor] = []
        scored = opened(engine, Full(), [*history, greedy])
        drain(engine.score(scored, [0], lambda _, found: logits.append(found)))
    expected = filtered_probabilities(logits[0][0], sampling)
    expected = expected / expected.sum()
    draft_token = int(expected.argmax())
    drafter = Knowing(text=[*history, greedy, draft_token, draft_token, draft_token])
    drawn: Counter[int] = Counter()
    accepted = 0
    with engine_for(Mode.BATCHED, drafter=drafter, draft_tokens=2) as engine:
        for seed in range(SEEDS):
            session = opened(engine, Full(), [*history, greedy])
            params = GenerateParams(max_tokens=1, sampling=Sampling(temperature=1.5, top_k=12, seed=seed))
            ids, done = ended(engine, session, params)
            drawn[ids[0]] += 1
            accepted += done.accepted_tokens
            engine.close_session(session)
    likely = [token for token in range(VOCABULARY) if expected[token] > 0]
    assert set(drawn) <= set(likely)
    counts = {token: SEEDS * float(expected[token]) for token in likely}
    chi = sum((drawn[token] - count) ** 2 / count for token, count in counts.items())
    assert chi < 35.0  # 11 degrees of freedom: one run in five thousand would be larger
    assert np.isfinite(chi)
