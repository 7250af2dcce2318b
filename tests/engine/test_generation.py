"""A Generate is iterated for its events, each of which is given once, however often an iteration begins."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import StreamTakenOver
from inference_engine.types import Event, Finished, GenerateParams, TokenCommitted
from tests.engine.sessions import Gate
from tests.load.scripted import scripted_engine

TOKENS = 20
LONGEST_SECONDS = 30


def ended(engine: Engine) -> tuple[Generation, list[int]]:
    """A Generate that is over, unread, so that one reading gives all of it; and its tokens."""
    session = engine.create_session().session_id
    engine.append(session, [1, 2, 3])
    generation = engine.generate(session, GenerateParams(max_tokens=TOKENS))
    until = time.monotonic() + LONGEST_SECONDS
    while engine.session_info(session).history_length < 3 + TOKENS or engine.session_info(session).is_generating:
        assert time.monotonic() < until
        time.sleep(0.005)
    return generation, engine.read_history(session, first=3).token_ids.tolist()


def tokens(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenCommitted)]


def test_an_iteration_goes_on_where_one_before_it_was_left() -> None:
    with scripted_engine() as engine:
        generation, expected = ended(engine)
        first = next(event for event in generation if isinstance(event, TokenCommitted))
        some = list(islice(generation, 4))
        rest = list(generation)
        assert [first.token_id, *tokens(some), *tokens(rest)] == expected
        assert isinstance(rest[-1], Finished)
        assert list(generation) == []


def test_what_a_generate_failed_with_is_raised_again() -> None:
    with scripted_engine() as engine:
        session = engine.create_session().session_id
        engine.append(session, [1, 2, 3])
        params = GenerateParams(max_tokens=TOKENS)
        first = engine.generate(session, params, request_id=b"a" * 16)
        engine.generate(session, params, request_id=b"a" * 16)
        for _ in range(2):
            with pytest.raises(StreamTakenOver):
                list(first)


def test_iterations_of_a_generate_that_runs_share_its_events() -> None:
    """The engine is held at a token, so that both wait for more."""
    gate = Gate()
    with scripted_engine() as engine:
        session = engine.create_session().session_id
        engine.append(session, [1, 2, 3])
        generation = engine.generate(session, GenerateParams(max_tokens=TOKENS), listener=gate)
        assert gate.reached.wait(LONGEST_SECONDS)
        older = (event for event in generation if isinstance(event, TokenCommitted))
        first = next(older)
        newer = iter(generation)
        gate.go_on.set()
        second = next(event for event in newer if isinstance(event, TokenCommitted))
        third = next(older)  # though the newer one is called when there is more
        assert [one.position for one in (first, second, third)] == [3, 4, 5]
        assert isinstance(list(newer)[-1], Finished)
        assert list(older) == []
