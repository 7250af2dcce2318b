"""Sessions that outlive the engine: all that was sent is there again, once, and goes on as if nothing had been."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event as ThreadEvent
from threading import Thread
from unittest.mock import patch

import apsw
import pytest

from inference_engine.engine import Engine
from inference_engine.errors import (
    EngineStalled,
    HistoryBehindClient,
    HistoryCorrupt,
    ModelMismatch,
    QuotaExceeded,
    RequestIdReused,
    SessionNotFound,
)
from inference_engine.metrics import EngineMetrics
from inference_engine.session import sqlite_journal
from inference_engine.session.journal import SessionKept
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.session.writer import Change
from inference_engine.types import (
    Durability,
    Event,
    Finished,
    GenerateParams,
    Mark,
    Mode,
    Sampling,
    StopReason,
    TokenCommitted,
)
from tests.engine.sessions import Clock
from tests.facade import (
    a_disk_that_fails,
    on_the_engines_thread,
    session_of,
)
from tests.kept import WEIGHTS, Place, after_a_kill, keeping, saved
from tests.kept import sqlite_journal as sqlite_journal_of
from tests.load.scripted import scripted_engine

ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))
PROMPT = list(range(3, 43))
LONG = GenerateParams(max_tokens=200, sampling=Sampling(temperature=0.8))


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenCommitted)]


def some(generation: Iterator[Event], count: int) -> list[Event]:
    """The next events, until there are so many tokens."""
    events: list[Event] = []
    for event in generation:
        events.append(event)
        if len(tokens_of(events)) >= count:
            break
    return events


def opened(engine: Engine, **settings: object) -> str:
    session_id = engine.create_session(**settings).session_id  # type: ignore[arg-type]
    engine.append(session_id, PROMPT)
    return session_id


def test_a_session_comes_back_while_another_owners_call_waits_for_what_is_not_written_yet(tmp_path: Path) -> None:
    with keeping(tmp_path) as engine:
        session = opened(engine)
    may_write, metrics = ThreadEvent(), EngineMetrics()

    class Late(SQLiteJournal):
        def _commit(self, changes: Sequence[Change]) -> None:
            may_write.wait()
            super()._commit(changes)

    journal = Late(tmp_path, Durability.PROCESS, weights=WEIGHTS, metrics=metrics)
    with scripted_engine(journal=journal, metrics=metrics, state_dir=str(tmp_path)) as engine:
        engine.create_session(owner="bob", request_id=ONE)
        waits = Thread(target=lambda: engine.recall("", owner="bob", request_id=TWO))
        comes = Thread(target=lambda: engine.recall(session))
        try:
            waits.start()
            comes.start()
            comes.join(20)
            assert engine.session_info(session).history_length == len(PROMPT)
            assert waits.is_alive()
        finally:
            may_write.set()
        waits.join()


def test_a_session_is_there_after_a_kill_with_its_id_owner_label_history_and_marks(place: Place) -> None:
    with keeping(place) as engine:
        session = engine.create_session(owner="alice", label="mine", eos_token_ids=[7], limit_tokens=900).session_id
        engine.append(session, PROMPT, owner="alice")
        said = tokens_of(list(engine.generate(session, GenerateParams(max_tokens=5), owner="alice")))
        saved(engine)
        whole = engine.read_history(session, owner="alice")
        killed = after_a_kill(place)
    for folder in (killed, place):  # after a kill, and after a stop in order, which is none either
        with keeping(folder) as engine:
            with pytest.raises(SessionNotFound):
                engine.read_history(session, owner="alice")  # nothing is loaded at start
            engine.recall(session, owner="bob")
            with pytest.raises(SessionNotFound):
                engine.read_history(session, owner="bob")
            engine.recall(session, owner="alice")
            again = engine.read_history(session, owner="alice")
            assert again.token_ids.tolist() == whole.token_ids.tolist() == PROMPT + said
            assert again.marks.tolist() == [Mark.APPENDED] * len(PROMPT) + [Mark.GENERATED] * 5
            info = engine.session_info(session, owner="alice")
            assert (info.label, info.limit_tokens, info.saved_tokens) == ("mine", 900, len(PROMPT) + 5)
            assert not info.is_resident
            assert engine.info().kv_reserved_bytes == 0


@pytest.mark.parametrize("logprobs", [False, True], ids=["ids", "logprobs"])
def test_a_generate_that_was_cut_goes_on_from_the_first_token_that_the_client_lacks(
    place: Place, logprobs: bool
) -> None:
    params = GenerateParams(max_tokens=60, sampling=Sampling(temperature=0.8), logprobs=logprobs)
    with keeping(place) as engine:
        session = opened(engine)
        events = iter(engine.generate(session, params, request_id=ONE))
        first = some(events, 9)
        killed = after_a_kill(place)
        rest = list(events)
    given = len(tokens_of(first))
    with keeping(killed) as engine:
        engine.recall(session)
        # The last token that was sent may have been lost on the way to the client.
        again = list(engine.generate(session, params, request_id=ONE, resume_from=len(PROMPT) + given - 1))
        assert tokens_of(again) == (tokens_of(first) + tokens_of(rest))[given - 1 :]
        if logprobs:
            sent = [event.logprob for event in first if isinstance(event, TokenCommitted)]
            found = [event.logprob for event in again if isinstance(event, TokenCommitted)]
            assert found[0] == sent[-1]
        was, done = rest[-1], again[-1]
        assert isinstance(was, Finished)
        assert isinstance(done, Finished)
        assert (done.generated_tokens, done.seed, done.is_replayed) == (60, was.seed, True)
        with pytest.raises(HistoryBehindClient):
            engine.generate(session, params, request_id=ONE, resume_from=len(PROMPT) + 61)


def test_a_generate_that_had_ended_is_answered_again_and_ends_as_it_did(place: Place) -> None:
    with keeping(place) as engine:
        session = opened(engine)
        params = GenerateParams(max_tokens=6, sampling=Sampling(temperature=0.8))
        first = list(engine.generate(session, params, request_id=ONE))
        to_eos = GenerateParams(max_tokens=50, stop_token_ids=tuple(range(60)))
        second = list(engine.generate(session, to_eos, request_id=TWO))
        engine.append(session, [1, 2, 3])
        saved(engine)
        killed = after_a_kill(place)
    with keeping(killed) as engine:
        engine.recall(session)
        for params_, request_id, before in ((params, ONE, first), (to_eos, TWO, second)):
            again = list(engine.generate(session, params_, request_id=request_id))
            assert tokens_of(again) == tokens_of(before)
            was, now = before[-1], again[-1]
            assert isinstance(was, Finished)
            assert isinstance(now, Finished)
            facts = (was.stop_reason, was.generated_tokens, was.history_length, was.seed)
            assert (now.stop_reason, now.generated_tokens, now.history_length, now.seed) == facts
        assert isinstance(second[-1], Finished)
        assert second[-1].stop_reason is StopReason.EOS
        with pytest.raises(RequestIdReused):
            engine.generate(session, LONG, request_id=ONE)


@pytest.mark.parametrize("change", ["generates = zeroblob(length(generates))", "session = 99"])
def test_a_session_is_refused_that_does_not_know_which_generates_it_answered(tmp_path: Path, change: str) -> None:
    """Else the call would be a new one when it is repeated: its tokens would come twice."""
    with keeping(tmp_path) as engine:
        session = opened(engine)
        list(engine.generate(session, GenerateParams(max_tokens=5), request_id=ONE))
    with closing(apsw.Connection(str(tmp_path / sqlite_journal.FILE))) as db:
        db.execute(f"update begun set {change}")
        assert db.changes() == 1
    with keeping(tmp_path) as engine, pytest.raises(HistoryCorrupt):
        engine.recall(session)


def test_a_reader_gets_all_that_is_safe_and_then_that_the_journal_failed(tmp_path: Path) -> None:
    """In a process of its own no watchdog ends it."""
    journal = sqlite_journal_of(tmp_path)
    with scripted_engine(journal=journal, state_dir=str(tmp_path)) as engine:
        session = opened(engine)
        with a_disk_that_fails(journal) as fails:
            generation = engine.generate(session, GenerateParams(max_tokens=10_000), request_id=ONE)
            reading = iter(generation)  # one iterator: what it has read would be lost to another
            events = some(reading, 3)
            fails.set()
            with pytest.raises(EngineStalled):
                events.extend(reading)
            assert journal.failure
            with pytest.raises(EngineStalled):
                engine.create_session()
    killed = after_a_kill(tmp_path)
    with keeping(killed) as engine:
        engine.recall(session)
        history = engine.read_history(session)
        said = tokens_of(events)
        assert list(history.token_ids)[len(PROMPT) : len(PROMPT) + len(said)] == said


def test_repeated_calls_are_answered_as_before_a_kill_and_do_nothing_twice(place: Place) -> None:
    with keeping(place) as engine:
        made = engine.create_session(request_id=ONE)
        session = made.session_id
        appended = engine.append_once(session, PROMPT, request_id=ONE)
        forked = engine.fork_session(session, request_id=TWO)
        other = engine.create_session().session_id
        engine.append_once(other, [1, 2], request_id=TWO)
        closed = engine.close_once(other, request_id=THREE)
        saved(engine)
        killed = after_a_kill(place)
    with keeping(killed) as engine:
        for request_id in (ONE, TWO, THREE):
            engine.recall("", request_id=request_id)
        engine.recall(session)
        again = engine.create_session(request_id=ONE)
        assert (again.session_id, again.bound, again.is_replayed) == (session, made.bound, True)
        assert engine.append_once(session, PROMPT, request_id=ONE).is_replayed
        assert engine.session_info(session).history_length == appended.tokens
        branch = engine.fork_session(session, request_id=TWO)
        assert (branch.session_id, branch.is_replayed) == (forked.session_id, True)
        assert (branch.history_length, branch.shared_bytes) == (forked.history_length, forked.shared_bytes)
        assert engine.append_once(other, [1, 2], request_id=TWO).tokens == 2  # closed, and remembered for a while
        assert engine.close_once(other, request_id=THREE).tokens == closed.tokens
        with pytest.raises(SessionNotFound):
            engine.session_info(other)
        with pytest.raises(RequestIdReused):
            engine.append_once(session, [1], request_id=ONE)
        assert {one.session_id for one in engine.list_sessions()} == {session, forked.session_id}


def test_a_fork_has_its_parents_history_after_a_kill_and_a_life_of_its_own(place: Place) -> None:
    with keeping(place) as engine:
        parent = opened(engine)
        list(engine.generate(parent, GenerateParams(max_tokens=4)))
        fork = engine.fork_session(parent).session_id
        expected = tokens_of(list(engine.generate(fork, GenerateParams(max_tokens=4))))
        engine.append(parent, [9])
        engine.close_session(parent)
        saved(engine)
        killed = after_a_kill(place)
    with keeping(killed) as engine:
        engine.recall(fork)
        assert engine.read_history(fork).token_ids.tolist()[len(PROMPT) + 4 :] == expected
        engine.recall(parent)
        with pytest.raises(SessionNotFound):
            engine.session_info(parent)


def test_a_session_that_leaves_memory_comes_back_and_one_that_is_closed_does_not(place: Place) -> None:
    now = 0.0
    with keeping(place, clock=lambda: now, session_idle_ttl_seconds=10.0, stall_seconds=1e6) as engine:
        first, second = opened(engine), opened(engine)
        expected = tokens_of(list(engine.generate(first, GenerateParams(max_tokens=8))))
        more = tokens_of(list(engine.generate(first, GenerateParams(max_tokens=8))))
        engine.close_session(second)
        now = 11.0
        list(engine.generate(opened(engine), GenerateParams(max_tokens=1)))  # the engine's thread looks before a step
        assert engine.is_elsewhere(first)
        listed = {one.session_id: one for one in engine.list_sessions()}
        assert second not in listed
        assert not listed[first].is_resident
        assert listed[first].history_length == len(PROMPT) + 16
        engine.recall(first)
        engine.recall(second)
        assert engine.read_history(first).token_ids.tolist() == PROMPT + expected + more
        with pytest.raises(SessionNotFound):
            engine.session_info(second)


@pytest.mark.parametrize("is_closed", [False, True], ids=["evicted", "closed"])
def test_a_session_that_is_asked_for_while_it_leaves_memory_is_read_when_it_has_left(
    tmp_path: Path, is_closed: bool
) -> None:
    with keeping(tmp_path, max_sessions=1, session_evictable_seconds=0.0) as engine:
        session = opened(engine)
        asking = Thread(target=engine.recall, args=(session,))
        reads = ThreadEvent()

        class Leaving:
            """A reader of the session, whose tokens end while it leaves."""

            def keep(self) -> None:
                asking.start()
                reads.wait(0.2)  # which does not come: the other thread has to wait

        load = SQLiteJournal.load

        def watched(journal: SQLiteJournal, session_id: str, owner: str) -> SessionKept | None:
            kept = load(journal, session_id, owner)
            reads.set()
            return kept

        leaving = Leaving()
        session_of(engine, session).readers.add(leaving)
        with patch.object(SQLiteJournal, "load", watched):
            if is_closed:
                engine.close_session(session)
            else:
                engine.create_session()  # needs the place
            asking.join(30)
        assert not asking.is_alive()
        if is_closed:
            with pytest.raises(SessionNotFound):
                engine.append(session, [5])
        else:
            assert engine.append(session, [5]) == len(PROMPT) + 1
            assert len(tokens_of(list(engine.generate(session, GenerateParams(max_tokens=3))))) == 3


def test_a_session_whose_history_is_more_than_its_owner_may_hold_is_refused_and_kept(place: Place) -> None:
    with keeping(place) as engine:
        first, second, large = opened(engine), opened(engine), opened(engine)
        engine.append(large, PROMPT)
        others = engine.create_session(owner="bob").session_id
        engine.append(others, PROMPT, owner="bob")
    with keeping(place, history_tokens_per_owner=2 * len(PROMPT) - 1) as engine:
        engine.recall(first)
        engine.recall(others, owner="bob")
        # The one may come once the other has left, the large one never.
        for session, may_come in ((second, True), (large, False)):
            with pytest.raises(QuotaExceeded, match="in memory hold 40") as refused:
                engine.recall(session)
            assert refused.value.metadata == {"quota": "history_tokens_per_owner", "limit": "79"}
            assert (refused.value.retry_after_seconds is not None) == may_come
        assert engine.history_tokens_of("") == engine.history_tokens_of("bob") == len(PROMPT)
        engine.close_session(first)
        engine.recall(second)
        assert engine.session_info(second).history_length == len(PROMPT)


def test_a_session_is_not_continued_under_settings_that_would_change_its_tokens(place: Place) -> None:
    with keeping(place) as engine:
        session = opened(engine)
    with keeping(place, segment_tokens=32) as engine, pytest.raises(ModelMismatch, match="segment_tokens 16"):
        engine.recall(session)
    with keeping(place) as engine:
        engine.recall(session)
        assert engine.session_info(session).history_length == len(PROMPT)


def test_a_session_may_be_promised_more_of_its_bits_and_never_less(place: Place) -> None:
    with keeping(place) as engine:
        first = opened(engine)
    with keeping(place, mode=Mode.FIXED_SHAPE) as engine:
        engine.recall(first)
        assert engine.session_info(first).history_length == len(PROMPT)
        second = opened(engine)
    with keeping(place) as engine:
        engine.recall(first)
        with pytest.raises(ModelMismatch, match="mode fixed-shape"):
            engine.recall(second)


def test_an_owner_keeps_no_more_sessions_and_tokens_than_one_may_and_others_are_not_concerned(place: Place) -> None:
    limits = {"kept_sessions_per_owner": 2, "kept_tokens_per_owner": 100}
    with keeping(place, **limits) as engine:
        first, second = (engine.create_session(owner="alice").session_id for _ in range(2))
        engine.append(first, PROMPT, owner="alice")
        with pytest.raises(QuotaExceeded, match="kept_sessions_per_owner") as refused:
            engine.create_session(owner="alice")
        assert refused.value.metadata == {"quota": "kept_sessions_per_owner", "limit": "2"}
        engine.create_session(owner="bob")
    with keeping(place, **limits) as engine:  # those that are not in memory count
        with pytest.raises(QuotaExceeded, match="kept_sessions_per_owner"):
            engine.create_session(owner="alice")
        engine.recall(second, owner="alice")
        with pytest.raises(QuotaExceeded, match="40 tokens of history of yours are kept"):
            engine.append(second, list(range(61)), owner="alice")
        engine.append(second, PROMPT, owner="alice")
        with pytest.raises(QuotaExceeded, match="kept_tokens_per_owner"):
            list(engine.generate(second, GenerateParams(max_tokens=50), owner="alice"))
        assert engine.session_info(second, owner="alice").history_length == 60
        with pytest.raises(QuotaExceeded, match="kept_tokens_per_owner"):
            engine.generate(second, GenerateParams(max_tokens=1), owner="alice")
        engine.recall(first, owner="alice")
        engine.close_session(first, owner="alice")
        engine.append(second, PROMPT, owner="alice")
        with pytest.raises(QuotaExceeded, match="100 tokens of history of yours"):
            engine.fork_session(second, owner="alice")
        engine.create_session(owner="alice", is_transient=False)


def test_a_session_that_was_brought_back_stays_in_memory_for_the_call_it_is_for(place: Place) -> None:
    clock = Clock()
    with keeping(place, clock=clock, wall_clock=clock, session_idle_ttl_seconds=100.0) as engine:
        session_id = opened(engine)
        clock.now += 1000
        on_the_engines_thread(engine)
        on_the_engines_thread(engine)  # by now a whole round has looked for what is idle
        engine.recall(session_id)
        on_the_engines_thread(engine)
        on_the_engines_thread(engine)
        assert engine.session_info(session_id).idle_seconds == 1000
        clock.now += 101
        on_the_engines_thread(engine)
        on_the_engines_thread(engine)
        with pytest.raises(SessionNotFound):
            engine.session_info(session_id)


def test_sessions_are_brought_back_side_by_side_and_each_once(tmp_path: Path) -> None:
    with keeping(tmp_path) as engine:
        sessions = [opened(engine) for _ in range(3)]
    slow, asked, may_go = sessions[0], list[str](), ThreadEvent()

    class Slow(SQLiteJournal):
        """Where one session's records take long to come."""

        def load(self, session_id: str, owner: str) -> SessionKept | None:
            asked.append(session_id)
            if session_id == slow:
                assert may_go.wait(30)
            return super().load(session_id, owner)

    journal = Slow(tmp_path, Durability.PROCESS, weights=WEIGHTS, metrics=EngineMetrics())
    with scripted_engine(journal=journal, state_dir=str(tmp_path)) as engine, ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(engine.recall, slow) for _ in range(2)]
        try:
            for other in sessions[1:]:
                threads.submit(engine.recall, other).result(30)
                assert not engine.is_elsewhere(other)
            assert engine.is_elsewhere(slow)
        finally:
            may_go.set()
        for one in waiting:
            one.result(30)
        assert sorted(asked) == sorted(sessions), "each is read once"
        assert engine.read_history(slow).token_ids.tolist() == PROMPT
