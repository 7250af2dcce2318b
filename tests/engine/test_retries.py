"""Generates that come again with their request id: each is replayed or goes on."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from inference_engine.backends.base import Step
from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import (
    DeadlineExceeded,
    HistoryBehindClient,
    InternalError,
    InvalidArgument,
    OutOfMemory,
    Overloaded,
    RequestError,
    RequestIdReused,
    StreamTakenOver,
)
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.types import (
    Accepted,
    Event,
    Failed,
    Finished,
    GenerateParams,
    Progress,
    Sampling,
    TokenCommitted,
    Truncated,
)
from tests.engine.sessions import Gate, opened
from tests.facade import remembered_generates, session_of
from tests.laws.variants import drain, generate, tokens
from tests.tiny_native import served_engine

ONE, OTHER = b"1" * 16, b"2" * 16
ENDLESS = SinkWindow(sink=4, window=16)
SAMPLED = Sampling(temperature=1.5, top_p=0.9, repetition_penalty=1.3, seed=11)
KINDS = pytest.mark.parametrize(
    "sampling", [Sampling(repetition_penalty=1.2), SAMPLED], ids=["greedy with a penalty", "sampled with a penalty"]
)


def history(engine: Engine, session_id: str) -> list[int]:
    ids: list[int] = session_of(engine, session_id).history.ids().tolist()
    return ids


def stopped_after(
    engine: Engine, session_id: str, params: GenerateParams, count: int, stop: Callable[[Generation], object]
) -> Event:
    """Run the Generate with the id ONE, stop it when it has given `count` more tokens; its last event."""
    gate = Gate(count)
    generation = engine.generate(session_id, params, request_id=ONE, listener=gate, wait_seconds=30)
    assert gate.reached.wait(30)
    stop(generation)
    gate.go_on.set()
    return gate.rest()[-1]


def failure(generation: Generation) -> tuple[list[Event], BaseException]:
    """The events of a Generation that fails, and its error."""
    events: list[Event] = []
    with pytest.raises(RequestError) as caught:
        events.extend(generation)
    return events, caught.value


def test_a_generate_that_is_read_after_its_end_says_what_it_had_to_prefill() -> None:
    """On a fast device it ends before the server looks for its first event."""
    with served_engine() as engine:
        session = opened(engine, 40)
        generation = engine.generate(session, GenerateParams(max_tokens=2))
        is_over = threading.Event()
        generation.when_readable(lambda: is_over.set() if engine.session_info(session).history_length == 42 else None)
        assert is_over.wait(30)
        engine.append(session, [1], wait_seconds=30)  # nothing holds the session any more
        events = drain(generation)
        assert events[0] == Accepted(0, 40, first_position=40)
        assert events[1:-3] == [Progress(16, 40), Progress(32, 40), Progress(40, 40)]
        assert [type(event) for event in events[-3:]] == [TokenCommitted, TokenCommitted, Finished]


@KINDS
def test_a_generate_that_ended_is_reported_again_from_any_token_on(sampling: Sampling) -> None:
    params = GenerateParams(max_tokens=9, sampling=dataclasses.replace(sampling, seed=None), logprobs=True)
    with served_engine() as engine:
        session = opened(engine, 60, strategy=ENDLESS)
        first = drain(engine.generate(session, params, request_id=ONE))
        engine.append(session, [5, 6])
        generate(engine, session, 3)
        for skipped in (None, 0, 1, 4, 9):
            at = None if skipped is None else 60 + skipped
            again = drain(engine.generate(session, params, request_id=ONE, resume_from=at))
            reported = [event for event in first if isinstance(event, TokenCommitted)][skipped or 0 :]
            assert [event for event in again if isinstance(event, TokenCommitted)] == reported
            assert again[0] == Accepted(0, 0, first_position=60 + (skipped or 0), is_replayed=True)
            assert [event for event in again if isinstance(event, Truncated)] == first[-11:-10]
            assert isinstance(first[-1], Finished)
            assert again[-1] == dataclasses.replace(first[-1], is_replayed=True)
        assert engine.session_info(session).history_length == 60 + 9 + 2 + 3


def generate_plain(engine: Engine, length: int, count: int) -> list[tuple[int, float | None]]:
    return tokens(drain(engine.generate(opened(engine, length), GenerateParams(max_tokens=count))))


def test_a_generate_with_a_used_id_and_other_parameters_is_refused() -> None:
    params = GenerateParams(max_tokens=3, sampling=SAMPLED)
    with served_engine() as engine:
        session = opened(engine)
        drain(engine.generate(session, params, request_id=ONE))
        changes: list[dict[str, Any]] = [
            {"max_tokens": 4},
            {"sampling": dataclasses.replace(SAMPLED, seed=12)},
            {"sampling": dataclasses.replace(SAMPLED, logit_bias={1: 1.0})},
            {"stop_token_ids": (1,)},
            {"logprobs": True},
            {"expected_history_length": 20},
            {"drafting": False},
        ]
        for change in changes:
            with pytest.raises(RequestIdReused):
                engine.generate(session, dataclasses.replace(params, **change), request_id=ONE)
        assert engine.session_info(session).history_length == 23


def test_a_position_where_no_token_is_or_comes_next_is_refused() -> None:
    params = GenerateParams(max_tokens=3)
    with served_engine() as engine:
        session = opened(engine)
        with pytest.raises(InvalidArgument, match="remembered") as caught:
            engine.generate(session, params, request_id=ONE, resume_from=20)
        assert caught.value.field == "resume_from"
        with pytest.raises(HistoryBehindClient, match="20 tokens"):
            engine.generate(session, params, request_id=ONE, resume_from=21)
        with pytest.raises(InvalidArgument, match="remembered"):
            engine.generate(session, params, resume_from=20)
        drain(engine.generate(session, params, request_id=ONE))
        for outside in (0, 19):
            with pytest.raises(InvalidArgument, match="from 20 to 23"):
                engine.generate(session, params, request_id=ONE, resume_from=outside)
        for lost in (24, 2**40):
            with pytest.raises(HistoryBehindClient, match="23 tokens"):
                engine.generate(session, params, request_id=ONE, resume_from=lost)
        assert engine.session_info(session).history_length == 23


def test_the_last_generates_of_a_session_are_remembered() -> None:
    params = GenerateParams(max_tokens=1)
    with served_engine() as engine:
        session = opened(engine)
        ids = [bytes([number]) * 16 for number in range(9)]
        for request_id in ids:
            drain(engine.generate(session, params, request_id=request_id))
        for request_id in ids[1:]:
            drain(engine.generate(session, params, request_id=request_id))
        assert engine.session_info(session).history_length == 29
        # Forgotten: it is a new one. A client with tokens of the first would get an error.
        with pytest.raises(InvalidArgument, match="remembered"):
            engine.generate(session, params, request_id=ids[0], resume_from=21)


# -- a Generate that was stopped --------------------------------------------------------------------------------------


@KINDS
def test_a_drawn_seed_stays_the_same_when_a_generate_goes_on(sampling: Sampling) -> None:
    params = GenerateParams(max_tokens=16, sampling=dataclasses.replace(sampling, seed=None))
    with served_engine() as engine:
        session = opened(engine)
        stopped_after(engine, session, params, 5, lambda generation: generation.cancel())
        events = drain(engine.generate(session, params, request_id=ONE, wait_seconds=30))
        end = events[-1]
        assert isinstance(end, Finished)
        seeded = dataclasses.replace(params, sampling=dataclasses.replace(sampling, seed=end.seed))
        assert tokens(events) == tokens(drain(engine.generate(opened(engine), seeded)))


@pytest.mark.parametrize("how", ["deadline", "abort"])
def test_a_generate_that_ended_with_an_error_goes_on(how: str) -> None:
    params = GenerateParams(max_tokens=8)
    stop: dict[str, Callable[[Generation], object]] = {
        "deadline": lambda generation: generation.expire(),
        "abort": lambda generation: generation.abort(Overloaded("shed")),
    }
    with served_engine() as engine:
        session = opened(engine)
        last = stopped_after(engine, session, params, 3, stop[how])
        assert isinstance(last, Failed)
        assert isinstance(last.error, DeadlineExceeded if how == "deadline" else Overloaded)
        again = drain(engine.generate(session, params, request_id=ONE, resume_from=22, wait_seconds=30))
        assert tokens(again) == generate_plain(engine, 20, 8)[2:]


def test_a_generate_whose_step_failed_goes_on() -> None:
    params = GenerateParams(max_tokens=8)
    steps = 0

    def breaking(_: Step) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise RuntimeError("the device hiccups")

    with served_engine(on_step=breaking) as engine:
        session = opened(engine)
        events, error = failure(engine.generate(session, params, request_id=ONE))
        assert isinstance(error, InternalError)
        assert 0 < len(tokens(events)) < 8
        again = drain(engine.generate(session, params, request_id=ONE, wait_seconds=30))
        assert tokens(again) == generate_plain(engine, 20, 8)


@pytest.mark.parametrize(
    ("error", "reported"), [(torch.OutOfMemoryError("no memory"), OutOfMemory), (RuntimeError("a bug"), InternalError)]
)
@pytest.mark.parametrize("at", [1, 4, 8], ids=["first", "amid", "last"])
def test_a_generate_whose_entries_could_not_be_kept_goes_on(
    at: int, error: Exception, reported: type[Exception]
) -> None:
    """Its tokens were recorded before: they are reported all the same."""
    params = GenerateParams(max_tokens=8)
    with served_engine() as engine:
        session = opened(engine)
        kv = session_of(engine, session).kv
        commit = kv.commit

        def failing(length: int, taps: torch.Tensor | None) -> None:
            if length == 19 + at:
                raise error
            commit(length, taps)

        with patch.object(kv, "commit", failing):
            generation = engine.generate(session, params, request_id=ONE)
            events = drain(generation) if at == 8 else []
            if at < 8:
                events, ended_by = failure(generation)
                assert isinstance(ended_by, reported)
        assert len(tokens(events)) == at
        assert engine.session_info(session).history_length == 20 + at
        assert engine.session_info(session).cached_tokens == 0, "what is left of the entries is not trusted"
        again = drain(engine.generate(session, params, request_id=ONE, wait_seconds=30))
        assert tokens(again) == generate_plain(engine, 20, 8)


# -- a Generate that runs ---------------------------------------------------------------------------------------------


def test_the_newest_caller_has_the_stream_and_the_one_before_stops_nothing() -> None:
    params = GenerateParams(max_tokens=12)
    with served_engine() as engine:
        session, gate = opened(engine), Gate(4)
        older = engine.generate(session, params, request_id=ONE, listener=gate)
        assert gate.reached.wait(30)
        newer = engine.generate(session, params, request_id=ONE, resume_from=22)
        for stop in (older.cancel, older.expire):
            stop()
        gate.go_on.set()
        lost = gate.rest()[-1]
        assert isinstance(lost, Failed)
        assert isinstance(lost.error, StreamTakenOver)
        with pytest.raises(StreamTakenOver):
            list(older)
        events = drain(newer)
        assert tokens(events) == generate_plain(engine, 20, 12)[2:]
        assert events[0] == Accepted(0, 0, first_position=22, is_replayed=True)
        assert isinstance(events[-1], Finished)
        assert (events[-1].generated_tokens, events[-1].is_replayed) == (12, True)


def test_many_callers_that_attach_at_once_leave_one_complete_stream() -> None:
    params = GenerateParams(max_tokens=60, sampling=SAMPLED, logprobs=True)
    with served_engine() as engine:
        expected = tokens(drain(engine.generate(opened(engine), params)))
        session = opened(engine)
        endings: queue.SimpleQueue[tuple[str, list[tuple[int, float | None]]]] = queue.SimpleQueue()

        def attach() -> None:
            events: list[Event] = []
            try:
                events.extend(engine.generate(session, params, request_id=ONE, wait_seconds=30))
            except StreamTakenOver:
                endings.put(("taken over", tokens(events)))
            else:
                endings.put(("finished", tokens(events)))

        threads = [threading.Thread(target=attach) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        reported = [endings.get_nowait() for _ in threads]
        assert any(how == "finished" for how, _ in reported)
        for how, shown in reported:
            assert shown == (expected if how == "finished" else expected[: len(shown)])
        assert engine.session_info(session).history_length == 80


def test_what_is_remembered_of_a_generate_holds_no_memory_of_the_device() -> None:
    with served_engine() as engine:
        session = opened(engine)
        drain(engine.generate(session, GenerateParams(max_tokens=2, sampling=SAMPLED), request_id=ONE))
        (transcript,) = remembered_generates(engine)
        request = transcript._request
        assert request is not None
        assert request.sampler is None
        kept = [getattr(request, field.name) for field in dataclasses.fields(request)]
        assert not [value for value in kept if isinstance(value, torch.Tensor)]
