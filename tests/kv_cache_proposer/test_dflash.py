"""The drafter drafts in the engine as it learnt to in training, from memory that is bounded, counted and its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.decode.draft import CommittedTokens, Drafter, DraftMemory, Wanted
from inference_engine.kernels.gumbel_noise import key
from inference_engine.kv.context import KVContext
from kv_cache_proposer.dflash import recorded_drafts as graphs
from kv_cache_proposer.dflash.draft_tokens import TargetDraws, choose_draft_tokens
from kv_cache_proposer.dflash.drafter import DFlashDrafter
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from laboratory.training.drafter_blocks import Texts, blocks_at
from laboratory.training.drafter_measure import draft_states
from laboratory.training.drafter_taps import read_taps
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_network
from tests.tiny import PAGES, VOCABULARY, tiny_forward, tiny_model

LENGTH = 61
WINDOW = 24


def context(*, kv_bytes: int = 2**20) -> KVContext:
    """A fresh pool whose memory holds nothing but NaN."""
    forward = tiny_forward()
    opened = forward.open(forward.geometry(**PAGES), kv_bytes)
    opened.pool.memory.fill_(torch.nan)
    return opened


def history(seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY - 1, (length,), generator=torch.Generator().manual_seed(seed))


def make_drafter(network: DFlashNetwork | None = None) -> DFlashDrafter:
    return DFlashDrafter(network or tiny_network(), words_of(tiny_model()))


def opened(drafter: DFlashDrafter, place: KVContext) -> DraftMemory:
    memory = drafter.open(place)
    assert memory is not None
    return memory


def seen(memory: DraftMemory, ids: Tensor, first: int, end: int, network: DFlashNetwork) -> CommittedTokens:
    taps, _ = read_taps(tiny_model(), ids[None], network.config.tap_layers)
    return CommittedTokens(memory, first, ids[first:end].numpy().astype(np.uint32), taps[0, first:end])


def wanted(memory: DraftMemory, ids: Tensor, limit: int = 3, *, temperature: float = 0.0, seed: int = 0) -> Wanted:
    return Wanted(memory, ids.numpy().astype(np.uint32), limit, temperature, seed)


def by_training(network: DFlashNetwork, ids: Tensor, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The draft after `ids` as training computes it: over the whole text at once, without any memory."""
    texts = Texts(ids[None], torch.ones_like(ids[None], dtype=torch.bool))
    taps, _ = read_taps(tiny_model(), ids[None], network.config.tap_layers)
    blocks = blocks_at(texts, torch.tensor([[len(ids) - 1]]), block_size=network.config.block_size)
    words = words_of(tiny_model())
    keys = [key(seed, position) for position in range(len(ids), len(ids) + network.config.block_size - 1)]
    draws = (
        TargetDraws(torch.tensor([[keys]]), torch.tensor([[temperature]], dtype=torch.float64)) if temperature else None
    )
    draft_tokens: list[int] = choose_draft_tokens(
        network, words, draft_states(network, words, texts, blocks, taps), draws
    )[0, 0].tolist()
    return draft_tokens


def drafts(drafter: Drafter, asked: Sequence[Wanted]) -> list[list[int]]:
    return [[int(token) for token in draft] for draft in drafter.propose(asked)]


EACH_NETWORK = pytest.mark.parametrize("network", [tiny_network(), chained_network()], ids=["plain", "chained"])
EACH_KIND = pytest.mark.parametrize("is_recorded", [False, True], ids=["launched", "recorded"])


def lengths_and_cuts() -> list[tuple[int, tuple[int, ...]]]:
    """Each with each of the other, once: many cuts of few tokens are the same."""
    every = product((2, 20, 25, LENGTH), ((60,), (1, 2, 3, 60), (5, 30, 31, 59, 60), (23, 24, 25, 48, 60)))
    return list(
        dict.fromkeys((length, tuple(sorted({min(cut, length - 1) for cut in cuts}))) for length, cuts in every)
    )


@pytest.mark.parametrize(("length", "ends"), lengths_and_cuts(), ids=str)
@EACH_NETWORK
def test_a_draft_is_what_training_computes_however_tokens_arrived(
    network: DFlashNetwork, length: int, ends: tuple[int, ...]
) -> None:
    drafter, ids = make_drafter(network), history()[:length]
    memory = opened(drafter, context())
    for first, end in zip([0, *ends], ends, strict=False):
        drafter.observe([seen(memory, ids, first, end, network)])
    assert drafts(drafter, [wanted(memory, ids)]) == [by_training(network, ids)]


def test_sessions_drafted_for_together_get_what_each_would_alone() -> None:
    network = tiny_network()
    drafter, place = make_drafter(network), context()
    texts = [history(seed, length) for seed, length in enumerate((LENGTH, 1, 9, 40))]
    memories = [opened(drafter, place) for _ in texts]
    drafter.observe([seen(memory, ids, 0, len(ids) - 1, network) for memory, ids in zip(memories, texts, strict=True)])
    together = drafts(drafter, [wanted(memory, ids) for memory, ids in zip(memories, texts, strict=True)])
    assert together == [by_training(network, ids) for ids in texts]


@EACH_NETWORK
@EACH_KIND
def test_sessions_of_any_temperature_and_seed_are_drafted_for_together(
    network: DFlashNetwork, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What samples is drawn with the noise of its own seed and places; a greedy one gets what it would alone."""
    monkeypatch.setattr(graphs, "Recording", Unrecorded)
    place = context()
    drafter = DFlashDrafter(network, words_of(tiny_model()), records_graphs=is_recorded)
    drafter.prepare(place)
    sampled: list[dict[str, Any]] = [
        {}, {"temperature": 0.1, "seed": 3}, {"temperature": 2.0, "seed": 2**64 - 1}, {}, {"temperature": 0.1},
    ]  # fmt: skip
    texts = [history(seed, length) for seed, length in enumerate((LENGTH, 9, 9, 40, 1))]
    texts[2] = texts[1]
    memories = [opened(drafter, place) for _ in texts]
    drafter.observe([seen(memory, ids, 0, len(ids) - 1, network) for memory, ids in zip(memories, texts, strict=True)])
    asked = [wanted(memory, ids, **sampling) for memory, ids, sampling in zip(memories, texts, sampled, strict=True)]
    together = drafts(drafter, asked)
    assert together == [by_training(network, ids, **sampling) for ids, sampling in zip(texts, sampled, strict=True)]
    for other in (0.0, 100.0):  # both the scores and the noise have had a say
        others = [sampling and {**sampling, "temperature": other} for sampling in sampled]
        assert together != [by_training(network, ids, **sampling) for ids, sampling in zip(texts, others, strict=True)]


@pytest.mark.parametrize("missing", [range(10, 20), range(3, 50), range(45, 60), range(LENGTH - 1)], ids=str)
def test_positions_that_were_not_observed_are_not_seen(missing: range) -> None:
    """As if the text had held nothing there; older entries in the same slots least of all."""
    network = tiny_network()
    drafter, ids = make_drafter(network), history()
    memory = opened(drafter, context())
    for first, end in ((0, missing.start), (missing.stop, LENGTH - 1)):
        if first < end:
            drafter.observe([seen(memory, ids, first, end, network)])
    expected = _draft_without(network, ids, missing)
    assert drafts(drafter, [wanted(memory, ids)]) == [expected]


def _draft_without(network: DFlashNetwork, ids: Tensor, missing: range) -> list[int]:
    size, last = network.config.block_size, len(ids) - 1
    taps, _ = read_taps(tiny_model(), ids[None], network.config.tap_layers)
    entries = network.context(taps, torch.arange(len(ids))[None])
    visible = torch.tensor([max(0, last - WINDOW) <= p < last and p not in missing for p in range(len(ids))])
    mask = torch.cat([visible, torch.ones(size, dtype=torch.bool)])[None, None, None]
    block = torch.full((1, size), network.config.mask_token_id)
    block[0, 0] = ids[-1]
    words = words_of(tiny_model())
    held = torch.arange(len(ids))[None]
    states = network(words.embed(block, 1.0), torch.arange(last, last + size)[None], entries, mask, held)
    draft_tokens: list[int] = words.head(states[:, 1:]).argmax(-1)[0].tolist()
    return draft_tokens


def test_memory_is_bounded_counted_and_given_back() -> None:
    network = tiny_network()
    drafter, place = make_drafter(network), context()
    config = network.config
    entry_bytes = 2 * config.layers * config.kv_heads * config.head_dim * place.geometry.itemsize
    memory = opened(drafter, place)
    reserved = place.pool.reserved_bytes
    assert memory.held_bytes() == 0
    drafter.observe([seen(memory, history(), 0, 5, network)])
    assert memory.held_bytes() == 8 * entry_bytes  # five entries in two pages
    drafter.observe([seen(memory, history(), 5, LENGTH, network)])
    assert memory.held_bytes() == WINDOW * entry_bytes <= reserved
    memory.release()
    memory.release()
    assert place.pool.reserved_bytes == 0


@pytest.mark.parametrize("head_dim", [16, 12, 40])
def test_heads_of_another_size_than_the_targets_touch_no_neighbour(head_dim: int) -> None:
    config = replace(tiny_network().config, head_dim=head_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = DFlashNetwork(config)
    drafter, place = make_drafter(network), context()
    first, memory, last = (opened(drafter, place) for _ in range(3))
    for neighbour in (first, last):
        drafter.observe([seen(neighbour, history(4), 0, 40, network)])
    before = drafts(drafter, [wanted(one, history(4)[:41]) for one in (first, last)])
    drafter.observe([seen(memory, history(), 0, LENGTH - 1, network)])
    assert drafts(drafter, [wanted(one, history(4)[:41]) for one in (first, last)]) == before
    assert drafts(drafter, [wanted(memory, history())]) == [by_training(network, history())]


class Unrecorded:
    """In the place of a recording, which needs a GPU: what would have been recorded, computed anew."""

    def __init__(self, _idle: object, _device: object, compute: Callable[[Tensor], Any], _memory: object) -> None:
        self._compute = compute

    def run(self, *parts: np.ndarray[Any, Any]) -> Any:
        return self._compute(torch.from_numpy(np.concatenate(parts)))


@EACH_NETWORK
def test_what_is_recorded_computes_what_training_does(network: DFlashNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recording", Unrecorded)
    place = context()
    drafter = DFlashDrafter(network, words_of(tiny_model()), records_graphs=True)
    drafter.prepare(place)
    texts = [history(seed, length) for seed, length in enumerate((LENGTH, 9, 40))]
    memories = [opened(drafter, place) for _ in texts]
    for memory, ids in zip(memories, texts, strict=True):
        for first in range(0, len(ids) - 1, 7):
            drafter.observe([seen(memory, ids, first, min(first + 7, len(ids) - 1), network)])
    together = drafts(drafter, [wanted(memory, ids) for memory, ids in zip(memories, texts, strict=True)])
    assert together == [by_training(network, ids) for ids in texts]


@EACH_KIND
def test_layers_with_a_window_or_a_causal_mask_draft_from_what_they_see(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the network over the whole text at once; a ring that has gone round and one that has not."""
    monkeypatch.setattr(graphs, "Recording", Unrecorded)
    network, place = tiny_network(windows=(7, 0), causal=(True, False)), context()
    drafter = DFlashDrafter(network, words_of(tiny_model()), records_graphs=is_recorded)
    drafter.prepare(place)
    texts = [history(seed, length) for seed, length in enumerate((LENGTH, 9))]
    asked = []
    for ids in texts:
        memory = opened(drafter, place)
        drafter.observe([seen(memory, ids, 0, len(ids) - 1, network)])
        asked.append(wanted(memory, ids))
    expected = [_draft_without(network, ids, range(0)) for ids in texts]
    assert drafts(drafter, asked) == expected
    assert expected != [_draft_without(tiny_network(), ids, range(0)) for ids in texts]


def test_what_a_recording_reads_outlives_the_computation_it_was_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[int] = set()

    class Forgetful:
        """Like CUDA, remembers where tensors lay and holds none of them."""

        def __init__(self, _idle: object, _device: object, compute: FunctionType, _memory: object) -> None:
            cells = [cell.cell_contents for cell in compute.__closure__ or ()]
            read.update(held.untyped_storage().data_ptr() for held in cells if isinstance(held, Tensor))

    monkeypatch.setattr(graphs, "Recording", Forgetful)
    place = context()
    drafter = DFlashDrafter(tiny_network(), words_of(tiny_model()), records_graphs=True)
    drafter.prepare(place)
    gc.collect()
    strided = (one for one in gc.get_objects() if type(one) is Tensor and not one.is_mkldnn)
    held = {one.untyped_storage().data_ptr() for one in strided}
    assert read
    assert read <= held
