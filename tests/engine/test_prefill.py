"""Generates that prefill and generate nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import HistoryLengthMismatch, InvalidArgument, SessionClosed
from inference_engine.types import Event, Failed, Finished, GenerateParams, Mode, Progress, StopReason
from tests.engine.sessions import Gate, opened
from tests.engine.test_retries import ONE
from tests.kept import keeping
from tests.laws.variants import drain, generate, prefill, same
from tests.tiny_native import served_engine

PREFILL = GenerateParams(max_tokens=0)
LONG = 400


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served_engine(step_tokens=64) as engine:
        yield engine


def stopped(engine: Engine, session: str, stop: Callable[[Generation], object]) -> Event:
    """How a prefill ends that is stopped behind its first chunk."""
    gate = Gate(of=Progress)
    generation = engine.generate(session, PREFILL, request_id=ONE, listener=gate)
    assert gate.reached.wait(30)
    stop(generation)
    gate.go_on.set()
    return gate.rest()[-1]


def test_it_reports_like_any_generate_and_adds_nothing(engine: Engine) -> None:
    session = opened(engine, LONG)
    events = drain(engine.generate(session, PREFILL))
    chunks = [event for event in events if isinstance(event, Progress)]
    done = events[-1]
    assert isinstance(done, Finished)
    assert len(chunks) > 1
    assert chunks[-1] == Progress(LONG - 1, LONG - 1)
    assert (done.stop_reason, done.generated_tokens, done.history_length) == (StopReason.MAX_TOKENS, 0, LONG)
    assert (done.prefilled_tokens, done.cached_tokens) == (LONG - 1, 0)
    assert 0.0 < done.prefill_seconds <= done.total_seconds
    again = prefill(engine, session)
    assert (again.prefilled_tokens, again.cached_tokens) == (0, LONG - 1)


def test_a_history_at_its_limit_is_prefilled_and_an_empty_one_is_refused(engine: Engine) -> None:
    session = opened(engine, 40, limit_tokens=40)
    assert prefill(engine, session).stop_reason is StopReason.MAX_TOKENS
    with pytest.raises(InvalidArgument, match="history: it is empty"):
        engine.generate(engine.create_session().session_id, PREFILL)


def test_a_quota_of_tokens_that_is_used_up_refuses_no_prefill() -> None:
    with served_engine(history_tokens_per_owner=40) as engine:
        session = opened(engine, 40)
        assert prefill(engine, session).prefilled_tokens == 39


@pytest.mark.parametrize("stop", [Generation.cancel, Generation.expire])
def test_one_that_was_stopped_keeps_what_it_had_and_goes_on_with_its_id(
    engine: Engine, stop: Callable[[Generation], object]
) -> None:
    session = opened(engine, LONG)
    ended = stopped(engine, session, stop)
    assert isinstance(ended, Failed if stop is Generation.expire else Finished)
    held = engine.session_info(session).cached_tokens
    assert 0 < held < LONG - 1
    done = drain(engine.generate(session, PREFILL, request_id=ONE))[-1]
    assert isinstance(done, Finished)
    assert (done.stop_reason, done.prefilled_tokens, done.cached_tokens) == (StopReason.MAX_TOKENS, LONG - 1, 0)
    again = drain(engine.generate(session, PREFILL, request_id=ONE))[-1]
    assert again == dataclasses.replace(done, is_replayed=True)


def test_one_that_was_cancelled_does_not_go_on_behind_another_history(engine: Engine) -> None:
    session = opened(engine, LONG)
    stopped(engine, session, Generation.cancel)
    engine.append(session, [1])
    with pytest.raises(HistoryLengthMismatch):
        engine.generate(session, PREFILL, request_id=ONE)
    assert prefill(engine, session).cached_tokens > 0


def test_a_close_ends_it(engine: Engine) -> None:
    session = opened(engine, LONG)
    ended = stopped(engine, session, lambda _: engine.close_session(session))
    assert isinstance(ended, Failed)
    assert isinstance(ended.error, SessionClosed)
    assert engine.info().kv_reserved_bytes == 0


def test_the_journal_knows_nothing_of_it_and_a_repeated_one_prefills_after_a_restart(tmp_path: Path) -> None:
    with keeping(tmp_path, make=served_engine) as engine:
        session = opened(engine, 100)
        drain(engine.generate(session, PREFILL, request_id=ONE))
    with keeping(tmp_path, make=served_engine, hibernate="never") as engine:
        engine.recall(session)
        done = drain(engine.generate(session, PREFILL, request_id=ONE))[-1]
        assert isinstance(done, Finished)
        assert (done.history_length, done.prefilled_tokens) == (100, 99)
        said = generate(engine, session)
        assert same(said, generate(engine, opened(engine, 100)), Mode.BATCHED)
