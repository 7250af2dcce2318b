"""A step whose sessions go on decoding is planned by the step before it, and reads and writes the same entries."""

from __future__ import annotations

import pytest

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import GenerateParams, Sampling
from tests.facade import standing_still
from tests.laws.variants import drain, text, tokens
from tests.tiny import SMALL
from tests.tiny_native import tiny_native

SEGMENT: int = SMALL["segment_tokens"]
COUNTS = (5 * SEGMENT, 4 * SEGMENT, 3 * SEGMENT)  # tokens of the sessions: some end before others
STRATEGIES = ["full", "sink_window:sink=2,window=16", "gather:budget=40,block=8,sink=8,window=16"]
# With logprobs, since they show what ids hide; greedy without, which draws in a shorter way.
SAMPLINGS = {"sampled": Sampling(temperature=1.0, seed=1), "greedy": Sampling()}


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("named", STRATEGIES)
def test_a_long_generate_gives_the_tokens_of_many_short_ones_to_the_bit(named: str, kind: str) -> None:
    """The first token of each Generate is planned anew."""

    def params(count: int) -> GenerateParams:
        return GenerateParams(max_tokens=count, sampling=SAMPLINGS[kind], logprobs=kind == "sampled")

    with Engine(tiny_native(), EngineConfig(**SMALL)) as engine:

        def opened(number: int) -> str:
            session = engine.create_session(strategy=parse_strategy(named), limit_tokens=8 * SEGMENT).session_id
            engine.append(session, text(SEGMENT - 3 + number, seed=number))
            return session

        expected = []
        for number, count in enumerate(COUNTS):
            session = opened(number)
            expected.append([tokens(drain(engine.generate(session, params(1))))[0] for _ in range(count)])
        sessions = [opened(number) for number in range(len(COUNTS))]
        with standing_still(engine):
            running = [engine.generate(session, params(count)) for session, count in zip(sessions, COUNTS, strict=True)]
        assert [tokens(drain(generation)) for generation in running] == expected
