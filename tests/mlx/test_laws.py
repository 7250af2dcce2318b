"""The laws on MLX: those of other backends, run over TinyModel there. Every strategy, every law with every name of one.

In batched mode alone: fixed-shape mode is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import GenerateParams, Mode, Sampling
from tests import tiny
from tests.facade import forward_of, is_anything_held, on_the_engines_thread, rebuild_session
from tests.laws import test_drop_laws as drop_laws
from tests.laws import test_engine_laws as engine_laws
from tests.laws import test_fork_laws as fork_laws
from tests.laws.drafters import Knowing, Wrong
from tests.laws.variants import (
    all_strategies,
    covering,
    drain,
    each_strategy,
    engine_for,
    generate,
    same,
    text,
)
from tests.mlx.tiny import tiny_mlx

ON_TORCH = tiny.tiny_forward
SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7)


@pytest.fixture(autouse=True)
def _on_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of tests are engines on MLX, with less memory: it is written once when an engine opens."""
    monkeypatch.setattr(tiny, "tiny_forward", tiny_mlx)
    monkeypatch.setitem(tiny.SMALL, "kv_bytes", 12 * 2**20)


def spoken(mode: Mode, strategy: KVStrategy, **settings: Any) -> list[tuple[int, float | None]]:
    """Two Generates of a session, one greedy, one sampled."""
    with engine_for(mode, **settings) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text())
        first = generate(engine, session, 12)
        engine.append(session, text(20, seed=3))
        return first + generate(engine, session, 6, sampling=SAMPLED)


@each_strategy
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
    monkeypatch.undo()
    assert same(found, spoken(Mode.BATCHED, strategy), Mode.BATCHED)


def drafts_change_no_token(strategy: KVStrategy, mode: Mode) -> None:
    plain = spoken(mode, strategy)
    said = [*text(), *(token for token, _ in plain[:12])]
    for drafter in (Knowing(text=said, errs=5), Wrong()):
        assert same(spoken(mode, strategy, drafter=drafter, draft_tokens=3), plain, mode)


def nothing_is_left_of_a_session_that_was_cancelled(strategy: KVStrategy, mode: Mode) -> None:
    with engine_for(mode) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text())
        generation = engine.generate(session, GenerateParams(max_tokens=200))
        next(iter(generation))
        generation.cancel()
        drain(generation)
        assert generate(engine, session, 3)
        engine.close_session(session)
        on_the_engines_thread(engine)
        assert not is_anything_held(engine)


def dropped(strategy: KVStrategy, mode: Mode) -> None:
    drop_laws.test_a_session_whose_entries_were_dropped_goes_on_as_one_that_kept_them(strategy, mode)


def rebuilt(strategy: KVStrategy, mode: Mode) -> None:
    engine_laws.test_a_session_rebuilt_from_its_journal_goes_on_as_if_never_closed(strategy, mode)


def forked(strategy: KVStrategy, mode: Mode) -> None:
    fork_laws.test_a_fork_goes_on_as_a_session_built_from_scratch_and_its_parent_as_if_never_forked(
        strategy, True, mode
    )


LAWS: list[Callable[[KVStrategy, Mode], None]] = [
    drafts_change_no_token,
    nothing_is_left_of_a_session_that_was_cancelled,
    dropped,
    rebuilt,
    forked,
]


@pytest.mark.parametrize("strategy", [Full(), LayerWindow(window=16, full_layers=(0, 1, 2))], ids=str)
def test_a_fork_reads_its_parents_entries_in_place(strategy: KVStrategy) -> None:
    """Without a window of the model's own. A fork of a fork reads two prefixes, by the plan."""
    for law in (
        fork_laws.test_a_fork_goes_on_as_a_session_built_from_scratch_and_its_parent_as_if_never_forked,
        fork_laws.test_a_fork_of_a_fork_outlives_both,
    ):
        law(strategy, False, Mode.BATCHED)


def test_a_history_from_torch_goes_on_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories are token ids: what one executor recorded another resumes, and computes its entries again."""
    journal = MemoryJournal()
    with monkeypatch.context() as other:
        other.setattr(tiny, "tiny_forward", ON_TORCH)
        with engine_for(Mode.BATCHED, journal=journal) as engine:
            session = engine.create_session(strategy=Full()).session_id
            engine.append(session, text())
            generate(engine, session, 9)
            began, records = journal.read(session)
            expected = generate(engine, session, 9)
    with engine_for(Mode.BATCHED) as engine:
        assert forward_of(engine).facts.backend == "mlx"
        found = generate(engine, rebuild_session(engine, began, records).session_id, 9)
    assert same(found, expected, Mode.BATCHED)


@pytest.mark.parametrize(
    ("law", "strategy"),
    covering(LAWS, all_strategies(), of=lambda one: one.name if isinstance(one, KVStrategy) else one),
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_law_holds(law: Callable[[KVStrategy, Mode], None], strategy: KVStrategy) -> None:
    law(strategy, Mode.BATCHED)
