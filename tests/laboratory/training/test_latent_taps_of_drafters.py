"""A drafter may be given what latents say of its taps, and other taps near by than far away."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_cache_proposer.dflash.target import words_of
from laboratory.training.drafter_blocks import blocks_at
from laboratory.training.drafter_data import text_set
from laboratory.training.drafter_measure import Context, acceptance_length, draft_states, states_from
from laboratory.training.drafter_taps import read_taps
from laboratory.training.latent import calibrate
from laboratory.training.latent_taps import fit_latent_taps
from tests.kv_cache_proposer.drafter_cases import greedy_texts, tiny_network
from tests.tiny import tiny_model

LAYERS = (1, 2)


def error(found: Tensor, taps: Tensor) -> float:
    return float((found - taps).square().sum() / (taps - taps.mean((0, 1))).square().sum())


def test_latents_say_most_of_what_taps_do_and_codes_cost_some_of_it() -> None:
    model = tiny_model()
    batch = torch.randint(0, 120, (40, 64), generator=torch.Generator().manual_seed(1))
    other = torch.randint(0, 120, (4, 64), generator=torch.Generator().manual_seed(2))
    codec = calibrate(model, [batch], layers=LAYERS, bytes_per_token=96, group_layers=2)
    taps, last = read_taps(model, other, LAYERS)
    errors = {}
    for is_coded in (False, True):
        read = fit_latent_taps(model, [batch], codec, tap_layers=LAYERS, is_coded=is_coded)
        found, its_last = read(model, other, LAYERS)
        assert torch.equal(last, its_last) and found.shape == taps.shape
        errors[is_coded] = error(found, taps)
    assert errors[False] < errors[True] < 0.9


def test_contexts_side_by_side_are_one_context_where_they_meet() -> None:
    model, network = tiny_model(), tiny_network()
    batch = text_set(greedy_texts()).batch([0, 1])
    taps, _ = read_taps(model, batch.token_ids, network.config.tap_layers)
    blocks = blocks_at(batch, torch.tensor([[20, 30], [25, 12]]), block_size=4)
    words, window = words_of(model), network.config.context_window
    whole = draft_states(network, words, batch, blocks, taps)
    near, far = Context(read_taps, 1, 5), Context(read_taps, 6, window)
    torch.testing.assert_close(states_from(network, words, batch, blocks, {near: taps, far: taps}), whole)
    without = states_from(network, words, batch, blocks, {near: taps})
    assert not torch.allclose(without, whole, atol=1e-3)
    assert not torch.allclose(states_from(network, words, batch, blocks, {near: taps, far: 0 * taps}), whole, atol=1e-3)


def test_tokens_a_step_are_measured_in_the_contexts_given() -> None:
    model, network = tiny_model(), tiny_network()
    texts = list(text_set(greedy_texts()).batches(3))
    asked: list[tuple[int, ...]] = []

    def read(model: object, tokens: Tensor, layers: object) -> tuple[Tensor, Tensor]:
        asked.append(tuple(tokens.shape))
        return read_taps(tiny_model(), tokens, network.config.tap_layers)

    window = network.config.context_window
    given = acceptance_length(model, network, words_of(model), texts, [Context(read, 1, window)])
    assert len(asked) == len(texts)
    assert given == pytest.approx(acceptance_length(model, network, words_of(model), texts))
