"""The laws of going back, over every registered strategy and both modes: through the engine, on TinyModel.

A fork at a position, and a session that took the place of one rewound to it, go on as a session built from scratch with
those tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, SessionNotFound
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import Accepted, Finished, GenerateParams, Mode
from kv_cache_proposer.ngram import NgramDrafter
from tests.facade import drop_entries, is_anything_held, on_the_engines_thread, save_copies, standing_still
from tests.kept import keeping
from tests.laws.test_fork_laws import each_case_with, from_scratch, with_turns
from tests.laws.variants import (
    MODES,
    drain,
    each_mechanism,
    each_strategy_with,
    engine_for,
    generate,
    same,
    text,
    tokens,
)

# Of the 116 tokens of `with_turns`: in the last segment, which begins at 112; in earlier ones, before and behind a
# boundary of one, in the first segment, and both ends.
PLACES = ["113 97", "96 3", "115 55", "80 0", "116 1"]
IN_TURN = {"places": PLACES}


def goes_on(engine: Engine, session: str, prefilled: int | None = None) -> list[tuple[int, float | None]]:
    """Its tokens, at once and after more were appended. prefilled: tokens that it said it would prefill."""
    if not engine.session_info(session).history_length:
        engine.append(session, [1])
        prefilled = None
    events = drain(engine.generate(session, GenerateParams(max_tokens=3, logprobs=True)))
    assert isinstance(events[-1], Finished)
    assert prefilled in (None, events[-1].prefilled_tokens)
    engine.append(session, text(19, seed=5))
    return tokens(events) + generate(engine, session, 5)


@each_case_with("mode", MODES)
def test_a_fork_at_a_position_goes_on_as_if_its_parent_had_ended_there_and_the_parent_as_if_never_forked(
    strategy: KVStrategy, windowed: bool, mode: Mode
) -> None:
    journal = MemoryJournal()
    with engine_for(mode, windowed=windowed, journal=journal) as engine:
        parent = with_turns(engine, strategy)
        twin = from_scratch(engine, journal, parent)
        for at in (114, 80, 3):
            fork = engine.fork_session(parent, at_position=at)
            assert fork.history_length == engine.session_info(fork.session_id).history_length == at
            alone = from_scratch(engine, journal, fork.session_id)
            assert same(goes_on(engine, fork.session_id, fork.prefill_tokens), goes_on(engine, alone), mode)
        assert same(goes_on(engine, parent), goes_on(engine, twin), mode)


@each_strategy_with(mode=MODES, in_turn={"places": PLACES})
def test_a_rewound_session_goes_on_as_if_nothing_had_come_after(strategy: KVStrategy, mode: Mode, places: str) -> None:
    journal = MemoryJournal()
    with engine_for(mode, journal=journal) as engine:
        session, reserved = with_turns(engine, strategy), engine.info().kv_reserved_bytes
        for at in map(int, places.split()):  # each from where the one before it went back to, and has gone on
            rewound = engine.rewind_session(session, at)
            with pytest.raises(SessionNotFound):
                engine.session_info(session)
            session = rewound.session_id
            assert rewound.history_length == engine.session_info(session).history_length == at
            assert engine.info().kv_reserved_bytes <= max(reserved, rewound.bound.sustained_bytes)
            alone = from_scratch(engine, journal, session)
            assert same(goes_on(engine, session, rewound.prefill_tokens), goes_on(engine, alone), mode)
            engine.close_session(alone)
            engine.append(session, text(116 - at, seed=7))
            generate(engine, session, 2)
        engine.close_session(session)
        on_the_engines_thread(engine)
        assert (engine.info().kv_reserved_bytes, engine.info().tier_reserved_bytes) == (0, 0)


@each_mechanism
def test_twice_in_a_row_with_nothing_between_and_to_the_end_is_as_once(strategy: KVStrategy) -> None:
    journal = MemoryJournal()
    with engine_for(Mode.BATCHED, journal=journal) as engine:
        session = with_turns(engine, strategy)
        for at in (116, 114, 114, 113):
            session = engine.rewind_session(session, at).session_id
        fork = engine.fork_session(session, at_position=113).session_id
        alone = from_scratch(engine, journal, session)
        said = goes_on(engine, alone)
        assert same(goes_on(engine, session), said, Mode.BATCHED)
        assert same(goes_on(engine, fork), said, Mode.BATCHED)


@each_mechanism
def test_what_was_appended_after_going_back_has_no_entries_of_what_was_there(strategy: KVStrategy) -> None:
    """Whatever is done before the engine's thread has dropped those: go back again, fork, close."""
    journal = MemoryJournal()
    with engine_for(Mode.BATCHED, windowed=False, journal=journal, share_prefixes="off") as engine:
        session = with_turns(engine, strategy)
        with standing_still(engine):
            again = engine.rewind_session(session, 20).session_id
            engine.append(again, text(80, seed=8))
            fork = engine.fork_session(again, at_position=70)
            closed = engine.rewind_session(again, 60)
            engine.append(closed.session_id, text(60, seed=9))
            engine.close_session(closed.session_id)
            last = engine.fork_session(fork.session_id, at_position=50)
        # The other may take what the first one has prefilled by then.
        alone = from_scratch(engine, journal, fork.session_id)
        assert same(goes_on(engine, fork.session_id, fork.prefill_tokens), goes_on(engine, alone), Mode.BATCHED)
        alone = from_scratch(engine, journal, last.session_id)
        assert same(goes_on(engine, last.session_id), goes_on(engine, alone), Mode.BATCHED)
        session = with_turns(engine, strategy)
        with standing_still(engine):
            session = engine.rewind_session(session, 20).session_id
            engine.append(session, text(80, seed=8))
            rewound = engine.rewind_session(session, 90)
        alone = from_scratch(engine, journal, rewound.session_id)
        assert same(goes_on(engine, rewound.session_id, rewound.prefill_tokens), goes_on(engine, alone), Mode.BATCHED)


@each_mechanism
def test_what_a_fork_is_to_prefill_is_the_same_while_its_entries_are_copied(strategy: KVStrategy) -> None:
    said: list[int] = []
    take = SessionKV.take_prefix_states

    def look(kv: SessionKV) -> None:
        said.append(kv.pending(113))
        take(kv)

    with engine_for(Mode.BATCHED) as engine, patch.object(SessionKV, "take_prefix_states", look):
        parent = with_turns(engine, strategy)
        with standing_still(engine):
            fork = engine.fork_session(parent, at_position=113)
        on_the_engines_thread(engine)
        assert said == [fork.prefill_tokens]


@each_mechanism
def test_a_session_that_was_dropped_or_hibernated_goes_back_too(tmp_path: Path, strategy: KVStrategy) -> None:
    def make(**settings: Any) -> Engine:
        return engine_for(Mode.BATCHED, hibernate="always", **settings)

    with keeping(tmp_path / "state", make=make, share_prefixes="off") as engine:
        for goes_back in (True, False):
            said: list[tuple[list[tuple[int, float | None]], int]] = []
            for ending in ("", "dropped", "hibernated"):
                session = with_turns(engine, strategy)
                if ending == "hibernated":
                    assert save_copies(engine, tmp_path / "state")
                if ending:
                    drop_entries(engine, session)
                new = (
                    engine.rewind_session(session, 113) if goes_back else engine.fork_session(session, at_position=113)
                )
                if not goes_back and ending == "hibernated":  # and one of its own, before it was read itself
                    new = engine.fork_session(new.session_id)
                assert new.prefill_tokens is not None
                prefills = said[0][1] if ending == "hibernated" else new.prefill_tokens
                said.append((goes_on(engine, new.session_id, prefills), new.prefill_tokens))
            # Some strategies know only when they have memory again what they can have of a file.
            assert said[1][1] == 113 and said[2][1] in (said[0][1], 113)
            assert "full" not in str(strategy) or said[2][1] < 10
            assert same(said[0][0], said[1][0], Mode.BATCHED)
            assert same(said[0][0], said[2][0], Mode.BATCHED)


@pytest.mark.parametrize("growth", ["best_effort", "guaranteed"])
@pytest.mark.parametrize("strategy", [Full(), LayerWindow(window=16, full_layers=(0, 1, 2))], ids=str)
def test_within_what_forks_read_and_within_what_it_reads_itself_a_session_goes_back_without_touching_theirs(
    strategy: KVStrategy, growth: str
) -> None:
    journal = MemoryJournal()
    with engine_for(Mode.BATCHED, windowed=False, journal=journal, growth=growth) as engine:
        parent = with_turns(engine, strategy)
        fork = engine.fork_session(parent).session_id
        engine.append(fork, text(30, seed=6))
        generate(engine, fork, 4)
        grandchild = engine.fork_session(fork, at_position=140).session_id
        others = {each: from_scratch(engine, journal, each) for each in (fork, grandchild)}
        rewound = {}
        for at in (116, 100, 5):  # of which all but the first are within what the fork reads
            rewound[at] = engine.rewind_session(parent, at)
            parent = rewound[at].session_id
            alone = from_scratch(engine, journal, parent)
            assert same(goes_on(engine, parent, rewound[at].prefill_tokens), goes_on(engine, alone), Mode.BATCHED)
            engine.append(parent, text(60, seed=8))
            generate(engine, parent, 3)
        can_go_back = not engine.info().recurrent_state_bytes
        if can_go_back:
            assert rewound[100].shared_bytes > rewound[5].shared_bytes > 0
            assert rewound[100].prefill_tokens == rewound[5].prefill_tokens == 1
        for session, alone in others.items():
            inner = engine.rewind_session(engine.fork_session(session).session_id, 60)  # within the shared prefix
            assert inner.prefill_tokens == (1 if can_go_back else 60)
            scratch = from_scratch(engine, journal, inner.session_id)
            assert same(goes_on(engine, inner.session_id), goes_on(engine, scratch), Mode.BATCHED)
            assert same(goes_on(engine, session), goes_on(engine, alone), Mode.BATCHED)
        for one in engine.list_sessions():
            engine.close_session(one.session_id)
        on_the_engines_thread(engine)
        assert engine.info().kv_reserved_bytes == 0


@each_mechanism
def test_a_rewound_session_with_a_drafter_says_what_it_says_without(strategy: KVStrategy) -> None:
    said = []
    for drafter in (None, NgramDrafter(min_ngram=1)):
        with engine_for(Mode.FIXED_SHAPE, **({} if drafter is None else {"drafter": drafter})) as engine:
            session = engine.rewind_session(with_turns(engine, strategy), 113).session_id
            said.append(goes_on(engine, session))
    assert said[0] == said[1]


def test_a_position_behind_the_end_is_refused_and_nothing_is_changed() -> None:
    with engine_for(Mode.BATCHED) as engine:
        session = with_turns(engine, Full())
        for at in (117, -1):
            with pytest.raises(InvalidArgument, match="from 0 to 116, the history's length, got"):
                engine.rewind_session(session, at)
            with pytest.raises(InvalidArgument, match="from 0 to 116, the history's length, got"):
                engine.fork_session(session, at_position=at)
        assert [each.session_id for each in engine.list_sessions()] == [session]


def test_what_is_held_and_what_is_to_prefill_are_said_also_before_the_rest_is_dropped() -> None:
    with engine_for(Mode.BATCHED, windowed=False) as engine:
        session = with_turns(engine, Full())
        held = engine.session_info(session).kv_live_bytes
        with standing_still(engine):
            rewound = engine.rewind_session(session, 20)
            assert engine.session_info(rewound.session_id).kv_live_bytes == held > 0
            events = engine.generate(rewound.session_id, GenerateParams(max_tokens=1))
            accepted = next(iter(events))
            assert isinstance(accepted, Accepted) and accepted.prefill_tokens == rewound.prefill_tokens == 1
        on_the_engines_thread(engine)
        assert 0 < engine.session_info(rewound.session_id).kv_live_bytes < held
        assert isinstance(drain(events)[-1], Finished)


def test_after_a_rewind_to_the_beginning_nothing_of_the_session_is_left_in_memory() -> None:
    with engine_for(Mode.BATCHED) as engine:
        for strategy in (Full(),):
            session = engine.rewind_session(with_turns(engine, strategy), 0).session_id
            on_the_engines_thread(engine)
            assert engine.session_info(session).kv_live_bytes == 0
            assert not is_anything_held(engine)
