"""Random bytes and random messages, many calls at a time: nothing crashes, hangs, leaks or ends without a type."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.load.fuzzing import Fuzzing, fuzzed_engine
from tests.load.servicer import REQUESTS

SEEDS, MESSAGES = 4, 12_500


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_bytes_come_are_answered_or_refused_with_a_typed_error(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with fuzzed_engine() as engine:
        fuzzing = Fuzzing(engine, np.random.default_rng(seed))
        await fuzzing.send(MESSAGES)
        await fuzzing.check()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors[:3]
    # The messages got through to every method, and to what refuses them.
    assert {method for method, reason in fuzzing.seen if reason == "OK"} == set(REQUESTS)
    reasons = {reason for _, reason in fuzzing.seen}
    assert {"undecodable", "cancelled", "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE", "SESSION_NOT_FOUND"} <= reasons
    assert {"HISTORY_LENGTH_MISMATCH", "APPEND_TOO_LARGE", "SESSION_EVICTED", "REQUEST_ID_REUSED"} <= reasons
