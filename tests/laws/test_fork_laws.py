"""The laws of forks, over every registered strategy and both modes: through the engine, on TinyModel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import Finished, GenerateParams, Mode
from tests.facade import drop_entries, rebuild_session
from tests.further import covering, further
from tests.laws.variants import (
    MODES,
    all_strategies,
    drain,
    engine_for,
    generate,
    mechanism,
    meet_first,
    same,
    text,
    tokens,
)

# TinyModel has a layer with a window of its own, and then every strategy copies; without it some share.
CASES: list[tuple[KVStrategy, bool]] = [
    *((strategy, True) for strategy in all_strategies()),
    (Full(), False),
    (LayerWindow(window=16, full_layers=(0, 1, 2)), False),
]
LIMITS, GROWTHS = [170, 512], ["best_effort", "guaranteed"]
IN_TURN = {"limit": LIMITS, "growth": GROWTHS}


def named(value: object) -> str:
    if isinstance(value, bool):
        return "copies" if value else "may share"
    return str(value.value) if isinstance(value, Mode) else str(value)


def each_case_with(name: str, values: Sequence[object]) -> pytest.MarkDecorator:
    """Every case, and each mechanism, windowed or not, with each of the values; as `each_strategy_with` has them."""

    def common(one: Any) -> Hashable:
        return (mechanism(one[0]), one[1]) if isinstance(one, tuple) else one

    cases = covering(CASES, values, of=common)
    chosen = [
        (*case, value) if is_new else further(*case, value)
        for (case, value), is_new in zip(cases, meet_first(cases, of=common), strict=True)
    ]
    return pytest.mark.parametrize(("strategy", "windowed", name), chosen, ids=named)


each_case = pytest.mark.parametrize(("strategy", "windowed"), CASES, ids=named)


def with_turns(engine: Engine, strategy: KVStrategy) -> str:
    """A session of appended and generated tokens, whose last append waits for its prefill."""
    session = engine.create_session(strategy=strategy).session_id
    for turn in range(2):
        engine.append(session, text(49 + turn, seed=turn))
        generate(engine, session, 6)
    engine.append(session, text(5, seed=99))
    return session


def from_scratch(engine: Engine, journal: MemoryJournal, session_id: str) -> str:
    """A session of the same history and marks that no other one gave anything to."""
    return rebuild_session(engine, *journal.read(session_id)).session_id


@each_case_with("mode", MODES)
def test_a_fork_goes_on_as_a_session_built_from_scratch_and_its_parent_as_if_never_forked(
    strategy: KVStrategy, windowed: bool, mode: Mode
) -> None:
    journal = MemoryJournal()
    with engine_for(mode, windowed=windowed, journal=journal) as engine:
        parent = with_turns(engine, strategy)
        alone, twin = (from_scratch(engine, journal, parent) for _ in range(2))
        fork = engine.fork_session(parent)
        assert fork.history_length == engine.session_info(parent).history_length
        # Each says something else from here on.
        engine.append(fork.session_id, text(9, seed=5))
        engine.append(alone, text(9, seed=5))
        assert same(generate(engine, fork.session_id), generate(engine, alone), mode)
        assert same(generate(engine, parent, 6), generate(engine, twin, 6), mode)
        # And the fork is a session like any other.
        engine.append(fork.session_id, text(30, seed=6))
        engine.append(alone, text(30, seed=6))
        assert same(generate(engine, fork.session_id, 6), generate(engine, alone, 6), mode)


@each_case_with("mode", MODES)
def test_sessions_that_begin_alike_go_on_as_if_each_had_computed_all_of_it(
    strategy: KVStrategy, windowed: bool, mode: Mode
) -> None:
    """Asked together, and in turn: forks of a history without entries, the session they were made from, and another."""
    journal = MemoryJournal()
    with (
        engine_for(mode, windowed=windowed, journal=journal, share_prefixes="owner", step_tokens=48) as engine,
        engine_for(mode, windowed=windowed, step_tokens=48) as alone,
    ):
        parent = engine.create_session(strategy=strategy).session_id
        engine.append(parent, text(99))
        one, other = (engine.fork_session(parent).session_id for _ in range(2))
        another = engine.create_session(strategy=strategy).session_id
        engine.append(another, text(70))
        engine.append(another, text(99)[70:])
        for number, session in enumerate((other, another)):
            engine.append(session, text(9 + number, seed=5 + number))
        params = GenerateParams(max_tokens=6, logprobs=True)
        for turn in range(2):
            sessions = [one, parent, other, another]
            twins = [from_scratch(alone, journal, session) for session in sessions]
            running = [engine.generate(session, params) for session in sessions]
            for twin, generation in zip(twins, running, strict=True):
                assert same(tokens(drain(generation)), generate(alone, twin, 6), mode)
            engine.close_session(one)  # others may read its entries
            one = engine.create_session(strategy=strategy).session_id
            for session in (one, other, another):
                engine.append(session, text(99 if session == one else 20, seed=turn))


@each_case_with("mode", MODES)
def test_what_a_closed_session_leaves_is_as_if_each_had_computed_it(
    strategy: KVStrategy, windowed: bool, mode: Mode
) -> None:
    """Left after a prefill, where the next one goes on; and after tokens that the next one does not have."""
    journal = MemoryJournal()
    with (
        engine_for(mode, windowed=windowed, journal=journal, share_prefixes="owner") as engine,
        engine_for(mode, windowed=windowed) as alone,
    ):
        for said, seed in ((0, 3), (7, 4)):
            first = engine.create_session(strategy=strategy).session_id
            engine.append(first, text(99, seed=seed))
            drain(engine.generate(first, GenerateParams(max_tokens=said)))
            engine.close_session(first)
            assert (engine.info().kv_reserved_bytes, engine.info().tier_reserved_bytes) == (0, 0)
            second = engine.create_session(strategy=strategy).session_id
            engine.append(second, [*text(99, seed=seed), *text(10, seed=5)])
            twin = from_scratch(alone, journal, second)
            events = drain(engine.generate(second, GenerateParams(max_tokens=6, logprobs=True)))
            assert same(tokens(events), generate(alone, twin, 6), mode)
            assert isinstance(events[-1], Finished)
            # What lies in the second tier is not kept.
            has_any = not said and not engine.session_info(second).bound.tier_bytes
            assert said or events[-1].cached_tokens == (98 if has_any else 0)
            engine.close_session(second)


@each_case
def test_a_fork_computes_nothing_that_its_parent_had_computed(strategy: KVStrategy, windowed: bool) -> None:
    journal = MemoryJournal()
    with engine_for(Mode.BATCHED, windowed=windowed, journal=journal) as engine:
        parent = with_turns(engine, strategy)
        before = engine.session_info(parent)
        opened = engine.fork_session(parent)
        generate(engine, rebuild_session(engine, *journal.read(parent)).session_id, 1)  # entries are there by then
        fork, facts = opened.session_id, engine.session_info(opened.session_id)
        assert (facts.cached_tokens, facts.evicted_tokens) == (before.cached_tokens, before.evicted_tokens)
        if isinstance(strategy, Tiered):  # what was fetched is not copied
            assert facts.kv_live_bytes <= before.kv_live_bytes
        else:
            assert facts.kv_live_bytes == (0 if opened.shared_bytes else before.kv_live_bytes)
        assert facts.tier_live_bytes == before.tier_live_bytes
        of_parent, of_fork = (drain(engine.generate(id_, GenerateParams(max_tokens=2)))[-1] for id_ in (parent, fork))
        assert isinstance(of_parent, Finished)
        assert isinstance(of_fork, Finished)
        assert of_fork.cached_tokens == of_parent.cached_tokens > 90
        assert of_fork.prefilled_tokens == of_parent.prefilled_tokens


@each_case_with("mode", MODES)
def test_a_fork_of_a_fork_outlives_both(strategy: KVStrategy, windowed: bool, mode: Mode) -> None:
    journal = MemoryJournal()
    with engine_for(mode, windowed=windowed, journal=journal) as engine:
        parent = with_turns(engine, strategy)
        child = engine.fork_session(parent).session_id
        engine.append(child, text(30, seed=7))
        generate(engine, child, 6)
        grandchild = engine.fork_session(child).session_id
        engine.close_session(parent)
        engine.append(child, text(3, seed=8))
        generate(engine, child, 5)
        engine.close_session(child)
        # What others write now would show where entries were given up too early.
        other = engine.create_session(strategy=strategy).session_id
        engine.append(other, text(90, seed=20))
        generate(engine, other, 3)
        alone = from_scratch(engine, journal, grandchild)
        assert same(generate(engine, grandchild), generate(engine, alone), mode)
        for session in (other, grandchild, alone):
            engine.close_session(session)
        assert (engine.info().kv_reserved_bytes, engine.info().tier_reserved_bytes) == (0, 0)


@each_case_with("growth", GROWTHS)
def test_forks_hold_no_more_than_they_were_promised_and_every_byte_is_reserved_once(
    strategy: KVStrategy, windowed: bool, growth: str
) -> None:
    guaranteed = growth == "guaranteed"
    with engine_for(Mode.BATCHED, windowed=windowed) as engine:
        parent = engine.create_session(strategy=strategy, guaranteed=guaranteed)
        engine.append(parent.session_id, text(100))
        generate(engine, parent.session_id, 7)
        forks = [engine.fork_session(parent.session_id) for _ in range(2)]
        for turn, fork in enumerate(forks):
            engine.append(fork.session_id, text(60, seed=turn))
            for _ in engine.generate(fork.session_id, GenerateParams(max_tokens=9)):
                assert engine.session_info(fork.session_id).kv_live_bytes <= fork.bound.peak_bytes
            assert engine.session_info(fork.session_id).kv_live_bytes <= fork.bound.sustained_bytes
        facts = [engine.session_info(opened.session_id) for opened in (parent, *forks)]
        info = engine.info()
        at_the_end_of_a_prefix = info.recurrent_state_bytes if forks[0].shared_bytes else 0
        assert info.kv_reserved_bytes == sum(each.reserved_bytes for each in facts) + at_the_end_of_a_prefix
        for each in facts:
            assert each.kv_live_bytes <= each.reserved_bytes <= each.bound.sustained_bytes
            assert not guaranteed or each.reserved_bytes == each.bound.sustained_bytes
        for opened in (parent, *forks):
            engine.close_session(opened.session_id)
        assert (engine.info().kv_reserved_bytes, engine.info().tier_reserved_bytes) == (0, 0)


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("strategy", [strategy for strategy, windowed in CASES if not windowed], ids=named)
def test_a_fork_that_was_dropped_and_found_no_room_still_begins_in_its_parents_entries(
    strategy: KVStrategy, growth: str
) -> None:
    settings: dict[str, Any] = {"windowed": False, "growth": growth}
    with engine_for(Mode.BATCHED, **settings) as engine:
        whole = engine.create_session(strategy=strategy, guaranteed=True).bound.sustained_bytes
    journal = MemoryJournal()
    with engine_for(Mode.BATCHED, journal=journal, strategy=str(strategy), kv_bytes=2 * whole, **settings) as engine:
        parent = with_turns(engine, strategy)
        fork = engine.fork_session(parent)
        assert fork.shared_bytes
        generate(engine, fork.session_id, 4)
        drop_entries(engine, fork.session_id)
        others = []
        with suppress(NoCapacity):
            while True:
                others.append(engine.create_session(limit_tokens=32, guaranteed=True, owner="other").session_id)
        for _ in range(2):
            with pytest.raises(NoCapacity):
                engine.generate(fork.session_id, GenerateParams(max_tokens=6))
        for other in others:
            engine.close_session(other, owner="other")
        began, records = journal.read(fork.session_id)
        said = generate(engine, fork.session_id, 6)
        engine.close_session(parent)
        engine.close_session(fork.session_id)
        assert engine.info().kv_reserved_bytes == 0
        assert same(generate(engine, rebuild_session(engine, began, records).session_id, 6), said, Mode.BATCHED)
