"""Decode steps that are launched before the tokens of the one before have reached the host.

On a CPU a launched step is computed at once; what the loop does is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.backends.base import Launched, Result, Step
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.decode import matching
from inference_engine.engine import Engine
from inference_engine.errors import InternalError, NonFiniteLogits, RestorationFailed
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kernels.sampling import start_drawing
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.types import (
    Constraint,
    ConstraintKind,
    Event,
    Finished,
    GenerateParams,
    Mode,
    Progress,
    Sampling,
    StopReason,
)
from kv_cache_proposer.ngram import NgramDrafter
from tests.constraints import END, KINDS, TOKENS
from tests.engine.test_restoration_failures import Failing
from tests.facade import kv_of
from tests.further import FURTHER, further
from tests.laws.variants import drain, generate, same, text, tokens
from tests.tiny import LATENT_BYTES, SMALL, tiny_forward_on, tiny_latent

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)
DRAFTER = NgramDrafter(min_ngram=1)
HOLD = make_strategy("restored", sink=4, window=16, source="latent", bytes_per_token=LATENT_BYTES)
PENALISED = Sampling(temperature=0.9, repetition_penalty=1.3, seed=7)


@lru_cache(maxsize=1)
def together() -> TorchForward:
    return tiny_forward_on("cpu", ops=DeviceOps(attends_together=True))


def engine_with(overlap: str, **settings: Any) -> Engine:
    drafter, latent = settings.pop("drafter", None), settings.pop("latent", None)
    config = EngineConfig(**{**SMALL, "overlap": overlap, **settings})
    return Engine(together(), config, drafter=drafter, latent=latent, read_tokens=lambda: TOKENS)


def opened(engine: Engine, length: int = 20, **options: Any) -> str:
    session_id = engine.create_session(**options).session_id
    engine.append(session_id, text(length, seed=length))
    return session_id


def failed(generation: Any, error: type[Exception]) -> list[int]:
    """The tokens of a Generate that ends with that error."""
    seen: list[Event] = []

    def read() -> None:
        seen.extend(generation)

    with pytest.raises(error):
        read()
    return [token for token, _ in tokens(seen)]


class Launches:
    """What was launched, and which of it was waited for, in order. act: called before each is waited for."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.act: dict[int, Any] = {}  # by number of the step that is waited for

    def __call__(self, forward: TorchForward, step: Step, fed: Tensor | None = None) -> Launched:
        launched = TorchForward.launch(forward, step, fed)
        number = sum(word.startswith("launch") for word in self.seen)
        self.seen.append(f"launch {number}")
        return Waited(launched, number, self)


class Waited:
    def __init__(self, launched: Launched, number: int, launches: Launches) -> None:
        self._launched, self._number, self._launches = launched, number, launches

    @property
    def ids(self) -> Tensor:
        return self._launched.ids

    def draw(self) -> None:
        self._launched.draw()

    def result(self) -> Result:
        self._launches.seen.append(f"wait {self._number}")
        if self._number in self._launches.act:
            self._launches.act[self._number]()
        return self._launched.result()


@contextmanager
def launches_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    with monkeypatch.context() as patch:
        patch.setattr(together(), "launch", lambda step, fed=None: launches(together(), step, fed), raising=False)
        yield launches


def turns(overlap: str, sampling: Sampling, **settings: Any) -> list[list[tuple[int, float | None]]]:
    """Sessions that end at different steps, by a stop id and by length; one that comes later; and a second turn."""
    found = []
    with engine_with(overlap, latent=tiny_latent(), **settings) as engine:
        first = opened(engine, 20)
        stop = generate(engine, opened(engine, 20), 9, sampling=sampling)[-1][0]
        sessions = [
            opened(engine, 20, eos_token_ids=[stop]),
            opened(engine, 33, strategy=SinkWindow(sink=2, window=9)),
            opened(engine, 50),
            opened(engine, 41, strategy=HOLD),
        ]
        counts = (12, 9, 18, 15)
        for _ in range(2):
            running = [
                engine.generate(each, GenerateParams(max_tokens=count, sampling=sampling, logprobs=True))
                for each, count in zip(sessions, counts, strict=True)
            ]
            found.append(generate(engine, first, 10, sampling=sampling))  # joins them
            found.extend(tokens(drain(each)) for each in running)
            for each in sessions:
                engine.append(each, text(7, seed=3))
    return found


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        pytest.param(None, SAMPLED, id="plain-sampled"),
        pytest.param(DRAFTER, Sampling(), id="drafting-greedy", marks=FURTHER),
        pytest.param(DRAFTER, PENALISED, id="drafting-penalised"),
        pytest.param(None, Sampling(), id="plain-greedy", marks=FURTHER),
        pytest.param(None, PENALISED, id="plain-penalised", marks=FURTHER),
        pytest.param(DRAFTER, SAMPLED, id="drafting-sampled", marks=FURTHER),
    ],
)
def test_tokens_are_those_of_steps_that_are_waited_for(sampling: Sampling, drafter: Any) -> None:
    expected, found = turns("off", sampling, drafter=drafter), turns("on", sampling, drafter=drafter)

    for wanted, got in zip(expected, found, strict=True):
        assert same(wanted, got, Mode.BATCHED)


@pytest.mark.parametrize("drafter", [None, pytest.param(DRAFTER, marks=FURTHER)], ids=["plain", "drafting"])
@pytest.mark.parametrize("is_slow", [False, further(True)], ids=["at-once", "by-workers"])
def test_constrained_tokens_are_those_of_steps_that_are_waited_for(
    drafter: Any, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind, beside a free one: those that end by themselves, are cut, and have few tokens to begin with."""
    if is_slow:
        monkeypatch.setattr(matching, "SLOW_SECONDS", -1.0)

    def said(overlap: str) -> list[list[Any]]:
        with engine_with(overlap, drafter=drafter) as engine:
            params = [
                GenerateParams(max_tokens=most, sampling=sampling, constraint=kind.constraint, min_tokens=least)
                for kind in KINDS
                for sampling, most, least in ((Sampling(), 40, 0), (SAMPLED, 40, 3), (PENALISED, 7, 0))
            ]
            params.append(GenerateParams(max_tokens=40, sampling=SAMPLED))
            sessions = [opened(engine, 20 + at, eos_token_ids=[END]) for at in range(len(params))]
            running = [engine.generate(*each) for each in zip(sessions, params, strict=True)]
            return [[event for event in drain(each) if not isinstance(event, Progress)] for each in running]

    for expected, found in zip(said("off"), said("on"), strict=True):
        assert same(tokens(expected), tokens(found), Mode.BATCHED)
        (one, other) = expected[-1], found[-1]
        assert isinstance(one, Finished) and isinstance(other, Finished)
        assert (one.stop_reason, one.fits_constraint) == (other.stop_reason, other.fits_constraint)


def test_the_largest_logits_that_are_allowed_are_those_of_steps_that_are_waited_for() -> None:
    """Greedily, all of them launched ahead; a free one is beside them."""

    def said(overlap: str) -> list[list[tuple[int, float | None]]]:
        with engine_with(overlap) as engine:
            greedy = GenerateParams(max_tokens=40, drafting=False)
            params = [greedy, *(replace(greedy, constraint=kind.constraint) for kind in KINDS)]
            sessions = [opened(engine, 20 + at, eos_token_ids=[END]) for at in range(len(params))]
            running = [engine.generate(*each) for each in zip(sessions, params, strict=True)]
            return [tokens(drain(each)) for each in running]

    for expected, found in zip(said("off"), said("on"), strict=True):
        assert same(expected, found, Mode.BATCHED)


def test_a_constrained_step_is_launched_ahead_and_drawn_once_the_token_before_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching, "GRACE_SECONDS", 30.0)  # workers, which find the first masks, are never late
    letters = Constraint(kind=ConstraintKind.REGEX, source="[a-z]{40}")
    with launches_of(monkeypatch) as launches, engine_with("on") as engine:
        drain(engine.generate(opened(engine), GenerateParams(max_tokens=6, constraint=letters)))
    assert launches.seen[:5] == ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1"]


@pytest.mark.parametrize("well_before", [further(1), 2, further(3)])
def test_entries_that_come_back_as_nan_end_their_generate_and_no_other(well_before: int) -> None:
    """They are noticed when a step that read them arrives, and the step behind it is under way."""
    codec = Failing()
    with engine_with("on", latent=codec) as engine:
        ill, well = (opened(engine, 40, strategy=HOLD) for _ in range(2))
        beside = opened(engine, 33)
        expected, expected_beside = generate(engine, well, 60), generate(engine, beside, 60)
        again = opened(engine, 33)
        codec.well_before, codec.fails_in = well_before, "numbers"
        running = engine.generate(again, GenerateParams(max_tokens=60, logprobs=True))
        received = failed(engine.generate(ill, GenerateParams(max_tokens=60)), RestorationFailed)
        assert same(tokens(drain(running)), expected_beside, Mode.BATCHED)
        assert received == [token for token, _ in expected][: len(received)]
        assert engine.session_info(ill).history_length == 40 + len(received)
        codec.fails_in = ""
        rest = generate(engine, ill, 60 - len(received))
    assert same(rest, expected[len(received) :], Mode.BATCHED)


def test_a_step_is_launched_before_the_one_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with launches_of(monkeypatch) as launches, engine_with("on") as engine:
        session = opened(engine)
        generate(engine, session, 6)

    # The first token comes from the prefill; of the last step it is known that none follows.
    steps = 5
    expected = ["launch 0"]
    for number in range(1, steps):
        expected += [f"launch {number}", f"wait {number - 1}"]
    assert launches.seen == [*expected, f"wait {steps - 1}"]


def test_a_stop_id_ends_the_generate_and_the_step_behind_it_leaves_no_trace() -> None:
    with engine_with("on") as engine:
        said = [token for token, _ in generate(engine, opened(engine), 12)]
        at = next(place for place in range(4, 12) if said[place] not in said[:place])
        session = opened(engine, eos_token_ids=[said[at]])
        events = drain(engine.generate(session, GenerateParams(max_tokens=100)))

        assert isinstance(events[-1], Finished) and events[-1].stop_reason is StopReason.EOS
        assert [token for token, _ in tokens(events)] == said[: at + 1]
        kv = kv_of(engine, session)
        assert (kv.staged, kv.length) == (0, 20 + at)  # the stop id is recorded, and its entry is not computed
        engine.close_session(session)


@pytest.mark.parametrize("at_step", [0, 3])
def test_a_stop_that_comes_while_a_step_runs_takes_effect_and_loses_nothing(
    at_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launches_of(monkeypatch) as launches, engine_with("on") as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 30)]
        session, base = opened(engine), len(launches.seen) // 2
        generations: list[Any] = []
        launches.act[base + at_step] = lambda: generations.pop().cancel()
        generation = engine.generate(session, GenerateParams(max_tokens=400))
        generations.append(generation)
        events = drain(generation)

        assert isinstance(events[-1], Finished) and events[-1].stop_reason is StopReason.CANCELLED
        kept = [token for token, _ in tokens(events)]
        assert engine.session_info(session).history_length == 20 + len(kept)
        assert kept + [token for token, _ in generate(engine, session, 30 - len(kept))] == expected


def test_logits_that_are_not_finite_end_the_generate_and_the_session_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step behind them was launched with a token that does not count."""
    count = 0

    def poisoned(logits: Tensor, *rest: Any) -> Any:
        nonlocal count
        count += 1
        return start_drawing(torch.full_like(logits, torch.nan) if count == 4 else logits, *rest)

    with engine_with("on") as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 12)]
        session, beside = opened(engine), opened(engine, 31)
        with monkeypatch.context() as patch:
            patch.setattr("inference_engine.backends.torch_forward.start_drawing", poisoned)
            kept = failed(engine.generate(session, GenerateParams(max_tokens=12)), NonFiniteLogits)
        assert kept == expected[: len(kept)] and 0 < len(kept) < 12
        assert kept + [token for token, _ in generate(engine, session, 12 - len(kept))] == expected
        assert generate(engine, beside, 3)


def test_a_device_that_fails_a_launched_step_costs_its_generates_and_no_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise RuntimeError("the device failed")

    with launches_of(monkeypatch) as launches, engine_with("on") as engine:
        expected = [token for token, _ in generate(engine, opened(engine), 12)]
        session = opened(engine)
        launches.act[sum(word.startswith("launch") for word in launches.seen) + 4] = fails
        kept = failed(engine.generate(session, GenerateParams(max_tokens=12)), InternalError)
        assert kept == expected[: len(kept)]
        assert kept + [token for token, _ in generate(engine, session, 12 - len(kept))] == expected
