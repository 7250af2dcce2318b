"""Sessions that begin with the same tokens: these are prefilled once, for forks and for all of an owner's sessions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import NoCapacity, QuotaExceeded
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.prefixes import LEAST_TOKENS, border
from inference_engine.types import Accepted, Failed, Finished, GenerateParams, Progress
from tests.engine.sessions import Gate, opened
from tests.facade import drop_entries, session_of, standing_still
from tests.kept import keeping
from tests.laws.variants import drain, generate, text
from tests.tiny_native import served_engine

COMMON = 200
SOME = GenerateParams(max_tokens=6, logprobs=True)


def sharing_engine(*, share_prefixes: str = "owner", **settings: Any) -> Engine:
    # Without a window of the model's own, `full` keeps every entry where it is.
    return served_engine(windowed=False, step_tokens=48, share_prefixes=share_prefixes, **settings)


def forks_of(engine: Engine, parent: str, count: int = 4) -> list[str]:
    return [engine.fork_session(parent).session_id for _ in range(count)]


def generate_alone(length: int) -> list[int]:
    with sharing_engine(share_prefixes="off") as engine:
        return [token for token, _ in generate(engine, opened(engine, length), SOME.max_tokens)]


def said(engine: Engine, session: str, first: int = COMMON) -> list[int]:
    ids: list[int] = engine.read_history(session).token_ids[first:].tolist()
    return ids


def ended(generations: list[Generation]) -> list[Finished]:
    done = [drain(one)[-1] for one in generations]
    return [one for one in done if isinstance(one, Finished)]


def test_borders_are_few_and_the_next_is_never_far() -> None:
    for segment in (16, 48, 256):
        borders = [border(index, segment) for index in range(-1, 400)]
        assert borders[:2] == [0, min(LEAST_TOKENS, segment)]
        for one, following in pairwise(borders[1:]):
            assert one < following <= one + max(min(segment, one), one // 32)
            assert following <= segment or following % segment == 0
    assert border(300, 256) > 2**21


def test_what_a_fork_or_a_rewound_session_begins_with_is_hashed_once() -> None:
    """Of a long history that takes the engine's thread longer than several steps."""
    with sharing_engine() as engine:
        parent, other = opened(engine, COMMON), opened(engine, COMMON)
        ended([engine.generate(one, SOME) for one in (parent, other)])
        hashed, again = (list(session_of(engine, one).digests) for one in (parent, other))
        assert hashed == again and len(hashed) > 3
        segment = session_of(engine, parent).kv.context.geometry.segment_tokens
        fork = engine.fork_session(parent).session_id
        rewound = engine.rewind_session(other, 100).session_id
        for session, its, length in ((fork, hashed, COMMON + SOME.max_tokens), (rewound, again, 100)):
            found = session_of(engine, session).digests
            assert border(len(found) - 1, segment) <= length < border(len(found), segment)
            assert all(one is same for one, same in zip(found, its, strict=False))


@pytest.mark.parametrize("share_prefixes", ["owner", "off"])
@pytest.mark.parametrize("asked", ["together", "in turn"])
def test_forks_of_a_history_that_is_not_prefilled_compute_it_once(share_prefixes: str, asked: str) -> None:
    with sharing_engine(share_prefixes=share_prefixes) as engine:
        parent = opened(engine, COMMON)
        forks = forks_of(engine, parent)
        expected = generate_alone(COMMON)
        if asked == "together":
            done = ended([engine.generate(fork, SOME) for fork in (*forks, parent)])
        else:
            done = [ended([engine.generate(fork, SOME)])[0] for fork in (*forks, parent)]
        assert [one.prefilled_tokens for one in done] == [COMMON, 1, 1, 1, 1]
        assert [one.cached_tokens for one in done] == [0] + 4 * [COMMON - 1]
        for fork in forks:
            assert said(engine, fork) == expected
        # What forks read in place is in one bound; the parent, which came last, copies nothing either.
        assert engine.info().kv_reserved_bytes == sum(
            engine.session_info(one).reserved_bytes for one in (parent, *forks)
        )
        for one in (parent, *forks):
            info = engine.session_info(one)
            assert info.kv_live_bytes <= info.reserved_bytes <= info.bound.sustained_bytes
            engine.close_session(one)
        assert engine.info().kv_reserved_bytes == 0


@pytest.mark.parametrize("source", ["prefilled by one before", "open", "closed"])
def test_what_a_generate_will_find_is_not_in_the_prefill_that_it_is_accepted_with(source: str) -> None:
    with sharing_engine() as engine:
        common = text(COMMON)
        if source != "prefilled by one before":
            first = opened(engine, COMMON)
            generate(engine, first)
            if source == "closed":
                engine.close_session(first)
        sessions = []
        for number in range(4):
            sessions.append(engine.create_session().session_id)
            engine.append(sessions[-1], [*common, number, *text(6, seed=number + 1)])
        with standing_still(engine):
            generations = [engine.generate(session, SOME) for session in sessions]
        events = [drain(one) for one in generations]
        expected = [each[-1].prefilled_tokens for each in events if isinstance(each[-1], Finished)]
        assert [each[0].prefill_tokens for each in events if isinstance(each[0], Accepted)] == expected
        assert expected == ([COMMON + 7] if source == "prefilled by one before" else [7]) + 3 * [7]


@pytest.mark.parametrize("stop", [Generation.cancel, Generation.expire, "close"])
def test_if_the_one_that_prefills_ends_early_the_next_goes_on_from_there(
    stop: Callable[[Generation], object] | str,
) -> None:
    with sharing_engine() as engine:
        parent = opened(engine, COMMON)
        first, *others = forks_of(engine, parent, 3)
        gate = Gate(2, of=Progress)
        running = engine.generate(first, SOME, listener=gate)
        assert gate.reached.wait(30)
        waiting = [engine.generate(fork, SOME) for fork in others]
        if isinstance(stop, str):
            engine.close_session(first)
        else:
            stop(running)
        gate.go_on.set()
        assert isinstance(gate.rest()[-1], Finished if stop is Generation.cancel else Failed)
        second, third = ended(waiting)
        assert second.prefilled_tokens + second.cached_tokens == COMMON
        assert (second.cached_tokens > 0) is not isinstance(stop, str)  # those of a closed session are gone
        assert (third.prefilled_tokens, third.cached_tokens) == (1, COMMON - 1)
        expected = generate_alone(COMMON)
        for fork in others:
            assert said(engine, fork) == expected


def test_one_that_waits_for_another_can_be_cancelled_and_keeps_no_place_from_others() -> None:
    with sharing_engine(max_running=2) as engine:
        parent = opened(engine, COMMON)
        first, second = forks_of(engine, parent, 2)
        unlike = engine.create_session().session_id
        engine.append(unlike, text(40, seed=9))
        gate = Gate(1, of=Progress)
        running = engine.generate(first, SOME, listener=gate)
        assert gate.reached.wait(30)
        waiting, other = engine.generate(second, SOME), engine.generate(unlike, SOME)
        waiting.cancel()
        gate.go_on.set()
        assert ended([other])[0].prefilled_tokens == 40
        cancelled = ended([waiting])[0]
        assert (cancelled.stop_reason.value, cancelled.generated_tokens, cancelled.prefilled_tokens) == (
            "cancelled",
            0,
            0,
        )
        assert ended([running])[0].prefilled_tokens == COMMON


def test_ten_sessions_with_a_prefix_in_common_prefill_it_once_however_it_came() -> None:
    with sharing_engine() as engine:
        common, sessions = text(COMMON), []
        for number in range(10):
            session = engine.create_session().session_id
            cut = 17 * number
            engine.append(session, common[:cut])
            engine.append(session, [*common[cut:], number, *text(6, seed=number + 1)])
            sessions.append(session)
        done = ended([engine.generate(session, SOME) for session in sessions])
        assert sum(one.prefilled_tokens for one in done) == COMMON + 10 * 7
        assert [one.cached_tokens for one in done] == [0] + 9 * [COMMON]
        assert engine.metrics.shared_prefix_tokens._value.get() == 9 * COMMON
        with sharing_engine(share_prefixes="off") as alone:
            for number, session in enumerate(sessions):
                one = alone.create_session().session_id
                alone.append(one, [*common, number, *text(6, seed=number + 1)])
                expected = [token for token, _ in generate(alone, one, SOME.max_tokens)]
                assert said(engine, session, COMMON + 7) == expected


def test_nothing_is_shared_between_owners_strategies_or_where_it_is_off() -> None:
    with sharing_engine() as engine:
        generate(engine, opened(engine, COMMON))
        theirs = opened(engine, COMMON, owner="bob")
        done = drain(engine.generate(theirs, SOME, owner="bob"))[-1]
        assert isinstance(done, Finished)
        assert done.cached_tokens == 0
        windowed = opened(engine, COMMON, strategy=SinkWindow(sink=4, window=300))
        assert ended([engine.generate(windowed, SOME)])[0].cached_tokens == 0
    with sharing_engine(share_prefixes="off") as engine:
        generate(engine, opened(engine, COMMON))
        assert ended([engine.generate(opened(engine, COMMON), SOME)])[0].cached_tokens == 0


def test_a_session_that_closes_while_others_begin_with_its_entries_takes_none_away() -> None:
    with sharing_engine() as engine:
        expected = generate_alone(COMMON)
        first = opened(engine, COMMON)
        gate = Gate(1)
        engine.generate(first, GenerateParams(max_tokens=50), listener=gate)
        assert gate.reached.wait(30)
        second = opened(engine, COMMON)
        waiting = engine.generate(second, SOME)
        engine.close_session(first)
        gate.go_on.set()
        assert ended([waiting])[0].generated_tokens == SOME.max_tokens
        assert said(engine, second) == expected
        engine.close_session(second)
        assert engine.info().kv_reserved_bytes == 0


def test_a_dropped_session_begins_again_with_what_others_have() -> None:
    with sharing_engine() as engine:
        first, second = opened(engine, COMMON), opened(engine, COMMON)
        generate(engine, first)
        generate(engine, second)
        drop_entries(engine, second)
        assert ended([engine.generate(second, SOME)])[0].cached_tokens >= COMMON
        drop_entries(engine, first)
        drop_entries(engine, second)
        assert ended([engine.generate(first, SOME)])[0].cached_tokens == 0


def test_forks_that_come_back_after_a_restart_compute_their_history_once(tmp_path: Path) -> None:
    with keeping(tmp_path, make=sharing_engine) as engine:
        parent = opened(engine, COMMON)
        forks = forks_of(engine, parent)
    with keeping(tmp_path, make=sharing_engine) as engine:
        for fork in forks:
            engine.recall(fork)
        done = ended([engine.generate(fork, SOME) for fork in forks])
        assert [one.cached_tokens for one in done] == [0] + 3 * [COMMON - 1]


@pytest.mark.parametrize(
    "strategy",
    [
        make_strategy("full", codec="int8", exact_window=16),
        make_strategy("sink_window", sink=2, window=44),
        make_strategy("restored", sink=4, window=16),
        make_strategy("gather", budget=160, sink=0, window=20),
    ],
    ids=str,
)
def test_under_any_strategy_sessions_take_what_a_prefill_left(strategy: KVStrategy) -> None:
    with sharing_engine() as engine:
        parent = opened(engine, COMMON, strategy=strategy)
        forks = forks_of(engine, parent)
        first = engine.generate(forks[0], GenerateParams(max_tokens=0))
        done = ended([first, *(engine.generate(fork, SOME) for fork in forks[1:])])
        assert [one.cached_tokens for one in done] == [0] + 3 * [COMMON - 1]
        assert len({tuple(said(engine, fork)) for fork in forks[1:]}) == 1


def test_an_owners_quota_of_bytes_holds_and_what_is_shared_makes_room_in_a_small_pool() -> None:
    with sharing_engine() as engine:
        session = engine.create_session(limit_tokens=256, guaranteed=True)
        each = session.bound.sustained_bytes
    with sharing_engine(kv_bytes=5 * each, kv_bytes_per_owner=5 * each) as engine:
        parent = opened(engine, COMMON, limit_tokens=256, guaranteed=True)
        forks = forks_of(engine, parent)
        with pytest.raises((NoCapacity, QuotaExceeded)):
            engine.create_session(limit_tokens=256, guaranteed=True)
        done = ended([engine.generate(fork, SOME) for fork in forks])
        assert sum(one.prefilled_tokens for one in done) == COMMON + 3
        # Four forks hold the prefix once, so there is room again; what was promised to them still is.
        assert engine.reserved_by("").sustained_bytes <= engine.info().kv_reserved_bytes < 4 * each
        for fork in forks:
            assert generate(engine, fork, 40)
