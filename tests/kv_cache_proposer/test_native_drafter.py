"""The drafter's lists of operations draft what the network on torch drafts, and change no token of a native target."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch

from inference_engine.config import EngineConfig
from inference_engine.decode.draft import CommittedTokens, Drafter, DraftMemory, Wanted
from inference_engine.engine import Engine
from inference_engine.kv.context import KVContext
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.native.library import Format
from inference_engine.types import Finished, GenerateParams, Sampling
from kv_cache_proposer.dflash.drafter import DFlashDrafter
from kv_cache_proposer.dflash.native import NativeDrafter
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from kv_cache_proposer.hybrid import HybridDrafter
from kv_cache_proposer.ngram import NgramDrafter
from laboratory.training.drafter_taps import read_taps
from tests.further import further
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_network
from tests.laws.variants import drain, text, tokens
from tests.tiny import PAGES, SMALL, VOCABULARY, tiny_model
from tests.tiny_native import tiny_native

WINDOW, LENGTH = 24, 61
NETWORKS: dict[str, Callable[[], DFlashNetwork]] = {
    "plain": tiny_network,
    "chained": lambda: chained_network(chain=16),
    "narrow": lambda: tiny_network(windows=(7, 0), causal=(True, False)),
}
each_network = pytest.mark.parametrize("kind", NETWORKS)


@lru_cache(maxsize=4)
def network(kind: str) -> DFlashNetwork:
    return NETWORKS[kind]()


def exact(kind: str) -> NativeDrafter:
    """With the weights as they are: then it differs from torch by rounding alone."""
    return NativeDrafter(network(kind), tiny_native().program, observe_weights="auto", weights="auto")


def memory_of(drafter: Drafter) -> tuple[DraftMemory, KVContext]:
    """In a pool whose memory holds nothing but NaN."""
    forward = tiny_native()
    place = forward.open(forward.geometry(**PAGES), 2**20)
    place.pool.memory.fill_(torch.nan)
    memory = drafter.open(place)
    assert memory is not None
    return memory, place


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY - 1, (length,), generator=torch.Generator().manual_seed(seed))


def seen(memory: DraftMemory, ids: torch.Tensor, first: int, end: int, kind: str) -> CommittedTokens:
    taps, _ = read_taps(tiny_model(), ids[None], network(kind).config.tap_layers)
    return CommittedTokens(memory, first, ids[first:end].numpy().astype(np.uint32), taps[0, first:end])


def wanted(memory: DraftMemory, ids: torch.Tensor, limit: int, temperature: float, seed: int) -> Wanted:
    return Wanted(memory, ids.numpy().astype(np.uint32), limit, temperature, seed)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        case if place % 2 == number else further(*case)
        for place, kind in enumerate(NETWORKS)
        for number, case in enumerate(((kind, 0.0), (kind, 0.7)))
    ],
)
def test_native_drafts_are_those_of_torch(kind: str, temperature: float) -> None:
    """Sessions whose rings are empty, filling, full, gone round, and with a gap before what they see."""
    native, torchs = exact(kind), DFlashDrafter(network(kind), words_of(tiny_model()))
    lengths = (1, 9, WINDOW + 1, 40, LENGTH, LENGTH, LENGTH)
    gaps = (*[range(0)] * 5, range(10, 20), range(3, 50))
    asked: dict[Drafter, list[Wanted]] = {}
    for drafter in (native, torchs):
        _, place = memory_of(drafter)
        asked[drafter] = []
        for number, (length, missing) in enumerate(zip(lengths, gaps, strict=True)):
            memory, ids = drafter.open(place), ids_of(length, number)
            assert memory is not None
            cuts = [0, 5, *((missing.start, missing.stop) if missing else ()), length - 1]
            for first, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
                if first < min(end, length - 1) and first not in missing:
                    drafter.observe([seen(memory, ids, first, min(end, length - 1), kind)])
            asked[drafter].append(wanted(memory, ids, 3, temperature, number))
    drafts = {drafter: [draft.tolist() for draft in drafter.propose(some)] for drafter, some in asked.items()}
    assert drafts[native] == drafts[torchs]
    alone = [native.propose([one])[0].tolist() for one in asked[native]]
    assert alone == drafts[native]
    assert [native.propose([one])[0].tolist()[:2] for one in asked[native]] == [draft[:2] for draft in drafts[native]]


@each_network
def test_its_memory_is_bounded_counted_and_its_own(kind: str) -> None:
    """A neighbour's memory is not touched, and what drafting wrote is counted and not past what was reserved."""
    drafter = exact(kind)
    first, place = memory_of(drafter)
    reserved = place.pool.reserved_bytes
    memory, last = (drafter.open(place) for _ in range(2))
    assert memory is not None and last is not None
    for neighbour in (first, last):
        drafter.observe([seen(neighbour, ids_of(40, 4), 0, 40, kind)])
    before = [
        draft.tolist() for draft in drafter.propose([wanted(one, ids_of(41, 4), 3, 0, 0) for one in (first, last)])
    ]
    assert memory.held_bytes() == 0
    drafter.observe([seen(memory, ids_of(LENGTH), 0, LENGTH - 1, kind)])
    entries = memory.held_bytes()
    drafter.propose([wanted(memory, ids_of(LENGTH), 3, 0, 0)])
    assert entries < memory.held_bytes() <= reserved
    assert before == [
        draft.tolist() for draft in drafter.propose([wanted(one, ids_of(41, 4), 3, 0, 0) for one in (first, last)])
    ]


def test_the_targets_matrices_are_packed_once() -> None:
    target = tiny_native().program
    drafter = NativeDrafter(network("plain"), target)
    own = sum(parameter.numel() for parameter in network("plain").parameters())
    assert drafter.weight_bytes < 3 * own < target.weight_bytes
    assert set(target.formats()) == {Format.FLOAT32}


def generated(engine: Engine, strategy: KVStrategy, params: GenerateParams) -> tuple[list[int], Finished]:
    session = engine.create_session(strategy=strategy).session_id
    engine.append(session, text())
    events = drain(engine.generate(session, params))
    info, done = engine.session_info(session), events[-1]
    assert info.kv_live_bytes <= info.bound.sustained_bytes
    assert isinstance(done, Finished) and not done.is_degraded
    return [token for token, _ in tokens(events)], done


SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        (Full(), SAMPLED),
        (SinkWindow(sink=2, window=24), Sampling()),
        further(Full(), Sampling()),
        further(SinkWindow(sink=2, window=24), SAMPLED),
    ],
    ids=lambda value: str(value) if isinstance(value, KVStrategy) else "sampled" if value.temperature else "greedy",
)
def test_drafts_change_no_token_of_a_native_target(strategy: KVStrategy, sampling: Sampling) -> None:
    params = GenerateParams(max_tokens=60, sampling=sampling)
    config, forward = EngineConfig(**SMALL, draft_tokens=3), tiny_native()
    with Engine(forward, config) as engine:
        plain, _ = generated(engine, strategy, params)
    networks = [NativeDrafter(network(kind), forward.program) for kind in NETWORKS]
    hybrid = HybridDrafter(networks[0], NgramDrafter(min_ngram=1, max_ngram=2))
    drafters: list[Drafter] = [*networks, hybrid]
    for drafter in drafters:
        with Engine(forward, config, drafter=drafter) as engine:
            found, done = generated(engine, strategy, params)
        assert found == plain, drafter
        assert done.drafted_tokens > 0
