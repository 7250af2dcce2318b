"""Many sessions of many owners at once: each gets the tokens of its own history, whatever the others do."""

from __future__ import annotations

import numpy as np
import pytest

from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import GenerateParams, Mode, Sampling, TokenCommitted
from laboratory.scripted import Script
from tests.further import further
from tests.load.population import Population
from tests.load.scripted import scripted_engine, solo_of

SEEDS = [0, further(1)]
INTERLEAVINGS = 40


@pytest.mark.parametrize("seed", SEEDS)
def test_interleaved_operations_of_many_owners_leave_every_stream_its_own(seed: int) -> None:
    journal, rng = MemoryJournal(), np.random.default_rng(seed)
    with Population.engine(journal) as engine, scripted_engine() as alone:
        population = Population(engine, journal, alone, replay_every=4)
        population.fill(rng)
        for _ in range(INTERLEAVINGS):
            population.interleave(rng)
        shared_tokens = engine.metrics.shared_prefix_tokens._value.get()
        kept_tokens = engine.metrics.kept_prefix_tokens._value.get()
        given_back = engine.metrics.prefixes_released.labels("room")._value.get()
    counts = population.counts
    # The run did what it is for.
    assert counts.tokens > 10 * INTERLEAVINGS
    assert min(counts.cancelled, counts.evicted, counts.replayed, counts.alike, counts.rewound) > INTERLEAVINGS // 20
    assert shared_tokens > kept_tokens > 16 * INTERLEAVINGS // 20
    assert given_back > 0
    assert {"SessionNotFound", "SessionBusy", "HistoryLengthMismatch", "TokenOutOfRange"} <= set(counts.refused)


@pytest.mark.parametrize("max_batch", [further(1), 3, further(64)])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_grouping_of_appends_and_size_of_batches_change_no_token(mode: Mode, max_batch: int) -> None:
    rng = np.random.default_rng(max_batch)
    with scripted_engine(mode=mode, max_batch=max_batch) as engine:
        histories = [[int(token) for token in rng.integers(0, 256, rng.integers(1, 120))] for _ in range(24)]
        sessions = [_appended_in_pieces(engine, history, rng) for history in histories]
        running = [
            engine.generate(session, GenerateParams(max_tokens=6, sampling=Sampling(temperature=1.0, seed=number)))
            for number, session in enumerate(sessions)
        ]
        streams = [[event.token_id for event in run if isinstance(event, TokenCommitted)] for run in running]
    law = solo_of(Full())
    assert streams == [law.continued(history, 6, seed=number) for number, history in enumerate(histories)]


def test_a_session_whose_generate_takes_longer_than_its_time_to_live_goes_on() -> None:
    now, script = [0.0], Script()
    with scripted_engine(
        script=script, clock=lambda: now[0], session_idle_ttl_seconds=10.0, stall_seconds=1e6
    ) as engine:
        session = engine.create_session(limit_tokens=60).session_id
        engine.append(session, [1, 2, 3])

        def let_time_pass(_step: int) -> None:
            now[0] += 11.0

        script.on_step = let_time_pass
        running = engine.generate(session, GenerateParams(max_tokens=5))
        tokens = [event.token_id for event in running if isinstance(event, TokenCommitted)]
    assert tokens == solo_of(Full()).continued([1, 2, 3], 5)


def _appended_in_pieces(engine: Engine, history: list[int], rng: np.random.Generator) -> str:
    session = engine.create_session(limit_tokens=160).session_id
    cuts = sorted(int(cut) for cut in rng.integers(0, len(history) + 1, 3))
    for start, stop in zip([0, *cuts], [*cuts, len(history)], strict=True):
        engine.append(session, history[start:stop])
    return session
