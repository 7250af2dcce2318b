"""Laws of MLX beside torch, and those that tests/laws has not: every mechanism speaks, sessions change executors.

In batched mode alone: fixed-shape mode is refused. What queries see is a law over every strategy in `test_entries.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference_engine.backends.base import Forward
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Mode, Sampling
from tests import tiny
from tests.facade import forward_of, is_anything_held, on_the_engines_thread, save_copies
from tests.further import FURTHER, off_metal
from tests.kept import keeping
from tests.laws import test_fork_laws as fork_laws
from tests.laws import test_hibernation_laws as hibernation_laws
from tests.laws.drafters import Knowing, Wrong
from tests.laws.variants import (
    LATENT,
    all_strategies,
    drain,
    engine_for,
    generate,
    mechanism,
    same,
    text,
)
from tests.mlx.tiny import tiny_mlx
from tests.tiny_native import run_on, tiny_native

ON_TORCH = tiny.tiny_forward
MECHANISMS = list({mechanism(strategy): strategy for strategy in all_strategies()}.values())
FIRST = list({strategy.name: strategy for strategy in MECHANISMS}.values())  # of each name one
WINDOW = SinkWindow(sink=3, window=40)
SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7)


@pytest.fixture(autouse=True)
def _on_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of tests are engines on MLX, with less memory: it is written once when an engine opens."""
    run_on(tiny_mlx, monkeypatch)
    monkeypatch.setitem(tiny.SMALL, "kv_bytes", 12 * 2**20)


def spoken(mode: Mode, strategy: KVStrategy, **settings: Any) -> list[tuple[int, float | None]]:
    """Two Generates of a session, one greedy, one sampled."""
    with engine_for(mode, **settings) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text())
        first = generate(engine, session, 12)
        engine.append(session, text(20, seed=3))
        return first + generate(engine, session, 6, sampling=SAMPLED)


@pytest.mark.parametrize("strategy", [each if each in FIRST else off_metal(each) for each in MECHANISMS], ids=str)
def test_tokens_are_those_of_torch_beside_others_and_however_they_arrive(
    strategy: KVStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled: the noise is the same, so equal logits give equal ids."""
    with engine_for(Mode.BATCHED) as engine:
        assert forward_of(engine).facts.backend == "mlx"
        session = engine.create_session(strategy=strategy).session_id
        neighbours = [engine.create_session(strategy=one).session_id for one in (Full(), strategy)]
        for first, end in ((0, 7), (7, 100), (100, 150)):
            engine.append(session, text()[first:end])
        for index, neighbour in enumerate(neighbours):
            engine.append(neighbour, text(40 + 50 * index, seed=9 + index))
        running = [engine.generate(neighbour, GenerateParams(max_tokens=14)) for neighbour in neighbours]
        found = generate(engine, session, 12)
        for generation in running:
            drain(generation)
        engine.append(session, text(20, seed=3))
        found += generate(engine, session, 6, sampling=SAMPLED)
    run_on(ON_TORCH, monkeypatch)
    assert same(found, spoken(Mode.BATCHED, strategy), Mode.BATCHED)


def drafts_change_no_token(strategy: KVStrategy, mode: Mode = Mode.BATCHED) -> None:
    plain = spoken(mode, strategy)
    said = [*text(), *(token for token, _ in plain[:12])]
    drafter = Wrong() if isinstance(strategy, Full) else Knowing(text=said, errs=5)
    assert same(spoken(mode, strategy, drafter=drafter, draft_tokens=3), plain, mode)


def nothing_is_left_of_a_session_that_was_cancelled(strategy: KVStrategy) -> None:
    with engine_for(Mode.BATCHED) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text())
        generation = engine.generate(session, GenerateParams(max_tokens=200))
        next(iter(generation))
        generation.cancel()
        drain(generation)
        assert generate(engine, session, 3)
        engine.close_session(session)
        for _ in range(2):  # what was released is cleaned behind the first task
            on_the_engines_thread(engine)
        assert not is_anything_held(engine)


Law = Callable[[KVStrategy], None]
LAWS: list[Law] = [drafts_change_no_token, nothing_is_left_of_a_session_that_was_cancelled]


@pytest.mark.parametrize("strategy", [Full(), LayerWindow(window=16, full_layers=(0, 1, 2))], ids=str)
def test_a_fork_reads_its_parents_entries_in_place(strategy: KVStrategy) -> None:
    """Without a window of the model's own. A fork of a fork reads two prefixes, by the plan."""
    for law in (
        fork_laws.test_a_fork_goes_on_as_a_session_built_from_scratch_and_its_parent_as_if_never_forked,
        fork_laws.test_a_fork_of_a_fork_outlives_both,
    ):
        law(strategy, False, Mode.BATCHED)


@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        pytest.param(Full(), ON_TORCH, id="full-torch"),
        pytest.param(WINDOW, tiny_native, id="sink_window-native"),
        pytest.param(Full(), tiny_native, id="full-native", marks=FURTHER),
        pytest.param(WINDOW, ON_TORCH, id="sink_window-torch", marks=FURTHER),
    ],
)
def test_a_kept_session_goes_to_another_executor_and_back(
    other: Callable[..., Forward], strategy: KVStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its history goes; the file of its K/V, which is made each time, is of another executor and is not used."""
    never_moved = spoken_in_turns(tmp_path / "never", [tiny_mlx] * 3, strategy, monkeypatch)
    moved = spoken_in_turns(tmp_path / "moved", [other, tiny_mlx, other], strategy, monkeypatch)

    assert [not_used for _, _, not_used in moved] == [0, 1, 1]
    assert [cached for _, cached, _ in moved] == [0, 0, 0]
    assert never_moved[2][1] > 0, "its own file is used"
    for (found, *_), (expected, *_) in zip(moved, never_moved, strict=True):
        assert same(found, expected, Mode.BATCHED)


def spoken_in_turns(
    folder: Path, executors: list[Callable[..., Forward]], strategy: KVStrategy, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[tuple[int, float | None]], int, int]]:
    """A turn of one session in a server of each executor: tokens, how many had K/V before, how many files no use."""
    turns, session = [], ""
    for turn, make in enumerate(executors):
        run_on(make, monkeypatch)
        with keeping(folder, make=hibernation_laws.made_in(Mode.BATCHED)) as engine:
            if session:
                engine.recall(session)
            else:
                session = engine.create_session(strategy=strategy).session_id
            engine.append(session, text(50, seed=turn))
            found, cached = hibernation_laws.go_on(engine, session)
            turns.append((found, cached, hibernation_laws.reads(engine, "foreign")))
            assert len(save_copies(engine, folder)) == 1
    return turns


# What MLX's attention knows of a strategy: it reads all, a ring, or blocks of choice; or the plan attends on the host.
READS = [
    Full(),
    WINDOW,
    Gather(block=8, sink=4, window=16, budget=48),
    make_strategy("restored", **LATENT, window=9, mode="stream"),
]


@pytest.mark.parametrize("strategy", READS, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda one: one.__name__)
def test_a_law_holds(law: Law, strategy: KVStrategy) -> None:
    law(strategy)
