"""Random bytes and random messages, many calls at a time: nothing crashes, hangs, leaks or ends without a type."""

from __future__ import annotations

import logging
import random

import pytest

from tests.further import further
from tests.load.fuzzing import Fuzzing, fuzzed_engine
from tests.load.servicer import REQUESTS
from tests.load.units import Units, calls_of, some_units, unit_of

SEEDS = [0, further(1)]
MESSAGES = 5_000
UNITS = 60


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_bytes_come_are_answered_or_refused_with_a_typed_error(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with fuzzed_engine() as engine:
        fuzzing = Fuzzing(engine, random.Random(seed))
        await fuzzing.send(MESSAGES)
        await fuzzing.check()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors[:3]
    # The messages got through to every method, and to what refuses them.
    assert {method for method, reason in fuzzing.seen if reason == "OK"} == set(REQUESTS)
    reasons = {reason for _, reason in fuzzing.seen}
    assert {"undecodable", "cancelled", "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE", "SESSION_NOT_FOUND"} <= reasons
    assert {"HISTORY_LENGTH_MISMATCH", "APPEND_TOO_LARGE", "SESSION_EVICTED", "REQUEST_ID_REUSED"} <= reasons


def test_units_of_a_guided_fuzzer_reach_every_method_and_leave_nothing() -> None:
    with fuzzed_engine() as engine:
        units = Units(engine)
        for unit in some_units(random.Random(1), UNITS, vocab_size=engine.info().facts.vocab_size):
            units.run(unit)
        units.close()
    assert {method for method, reason in units.seen if reason == "OK"} == set(REQUESTS)
    assert {"undecodable", "INVALID_ARGUMENT", "SESSION_NOT_FOUND"} <= {reason for _, reason in units.seen}


def test_a_unit_means_the_calls_it_was_made_of_and_any_bytes_are_a_unit() -> None:
    calls = [("Generate", b"\x0a\x011"), ("GetServerInfo", b"")]
    assert list(calls_of(unit_of(calls))) == calls
    assert list(calls_of(unit_of(calls)[:-4])) == [("Generate", b"\x0a\x01")]
    assert not list(calls_of(b"\x00\x01"))
