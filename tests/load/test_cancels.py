"""A Generate that is cancelled stops within a step, keeps what it reported, and leaves the pool as it was."""

from __future__ import annotations

import numpy as np
import pytest

from laboratory.scripted import Script
from tests.further import further
from tests.load.cancels import Cancels
from tests.load.scripted import scripted_engine

SEEDS = [0, further(1)]
CANCELS = 200


@pytest.mark.parametrize("seed", SEEDS)
def test_cancels_at_random_instants_stop_within_a_step_and_leave_no_trace(seed: int) -> None:
    script, rng = Script(), np.random.default_rng(seed)
    with scripted_engine(script=script) as engine:
        cancels = Cancels(engine, script)
        while cancels.count < CANCELS:
            cancels.round(rng)
    # Some came before any token, and some long after.
    assert cancels.before_the_first > CANCELS // 20
    assert cancels.tokens > CANCELS
