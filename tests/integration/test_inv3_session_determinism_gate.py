"""INV-3: the token stream is the same however the history was built. Through the real server and the real SDK.

Fifty random splits of each of three histories, over several turns, in both modes: equal in fixed-shape mode to the bit
(log-probabilities included), equal in tokens in batched mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from inference_engine.types import Mode
from kakeya import Client, SinkWindow
from tests.further import FURTHER
from tests.laws.variants import text
from tests.server_thread import server_thread
from tests.tiny_native import served_engine

SPLITS = 50
TURNS = (21, 5, 36)  # past the window of 16 and the ends of segments of 16
GENERATED = 3


@contextmanager
def client_for(mode: Mode, *, seed: int) -> Iterator[Client]:
    with served_engine(seed=seed, mode=mode) as engine, server_thread(engine) as target, Client(target) as client:
        yield client


Turn = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, their log-probabilities


def stream(client: Client, strategy: SinkWindow | None, cuts: list[list[int]], *, sampled: bool) -> list[Turn]:
    """Build a history turn by turn, each turn appended in the pieces that `cuts` says, generating after each."""
    out: list[Turn] = []
    with client.create_session(strategy=strategy) as session:
        for number, length in enumerate(TURNS):
            turn = text(length, seed=number)
            edges = [0, *cuts[number], length]
            for start, stop in pairwise(edges):
                session.append(turn[start:stop])
            temperature = 0.8 if sampled else 0.0
            result = session.generate(GENERATED, logprobs=True, temperature=temperature, seed=11).result()
            out.append((result.token_ids, result.logprobs or ()))
        info = session.info()
        assert (info.inv1_violations, info.inv2_violations, info.inv3_violations) == (0, 0, 0)
    return out


def cases() -> Iterator[Any]:
    """Every history in each mode. `make test` has one of them, to the bit."""
    window = SinkWindow(sink=4, window=16)
    for name, seed, strategy, sampled, first in (
        ("full, greedy", 0, None, False, None),
        ("sink_window, greedy", 1, window, False, None),
        ("full, sampled", 2, None, True, Mode.FIXED_SHAPE),
    ):
        for mode in Mode:
            marks = () if mode is first else FURTHER
            yield pytest.param(mode, seed, strategy, sampled, marks=marks, id=f"{name}-{mode.value}")


@pytest.mark.parametrize(("mode", "seed", "strategy", "sampled"), list(cases()))
def test_fifty_random_splits_give_one_stream(mode: Mode, seed: int, strategy: SinkWindow | None, sampled: bool) -> None:
    rng = np.random.default_rng(seed)
    with client_for(mode, seed=seed) as client:
        whole = stream(client, strategy, [[], [], []], sampled=sampled)
        for _ in range(SPLITS):
            cuts = [sorted(int(cut) for cut in rng.integers(0, length + 1, rng.integers(0, 6))) for length in TURNS]
            split = stream(client, strategy, cuts, sampled=sampled)
            if mode is Mode.FIXED_SHAPE:
                assert split == whole
            else:
                assert [tokens for tokens, _ in split] == [tokens for tokens, _ in whole]
