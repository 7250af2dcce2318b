"""A draw from few candidates gives the token of the draw from all, or says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_engine.kernels.cpu_sampling import MOST, Bits, Heavy, HostRow, Row, drawn_from_few
from inference_engine.kernels.filters import draw
from inference_engine.kernels.sampler import Sampler
from inference_engine.kernels.sampling import Draw, draw_all
from inference_engine.types import Sampling
from tests.decode.test_drawing_together import noise_keys
from tests.tiny_native import library

VOCABULARY = 5000
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.01, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 70, 4000]),
    top_p=st.sampled_from([1.0, 1e-6, 0.5, 0.9, 0.95, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
)


@given(
    st.lists(samplings, min_size=1, max_size=3),
    st.lists(noise_keys, min_size=3, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1.0, 3.0, 10.0]),
    st.sampled_from([0, 1, 4]),
)
@settings(deadline=None, max_examples=300)
def test_few_candidates_give_the_token_that_all_give(
    chosen: list[Sampling], keys: list[int], seed: int, spread: float, steps: int
) -> None:
    """Peaked rows and flat ones; with ties, within and across the border of what is kept."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(chosen), VOCABULARY, generator=generator) * spread
    logits[:, torch.randint(0, VOCABULARY, (12,), generator=generator)] += 6.0
    if steps:
        logits = (logits * steps).round() / steps
    found = drawn_from_few([*map(HostRow, logits.numpy(), chosen, keys)])
    for one, sampling, key, token in zip(logits, chosen, keys, found, strict=False):
        assert token is None or token == int(draw(one[None], [sampling], [key])[0])


def weighed(rows: Sequence[Row], masks: Sequence[Bits | None], temperatures: Sequence[float]) -> list[Heavy | None]:
    """Implements Weigh, as the kernels do."""
    found = list[Heavy | None]()
    for row, mask, temperature in zip(rows, masks, temperatures, strict=True):
        left = HostRow(row, Sampling(), 0, mask=mask).unmasked().logits.astype(np.float64)
        weights = np.exp((left - left.max()) / temperature)
        heavy = np.flatnonzero(weights >= np.exp(-8.0))
        found.append(Heavy(heavy, float(np.delete(weights, heavy).sum())))
    return found


@given(
    st.lists(samplings, min_size=1, max_size=3),
    st.lists(noise_keys, min_size=3, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([1.0, 3.0, 10.0]),
    st.sampled_from([0.3, 0.5, 0.97]),
)
@settings(deadline=None, max_examples=200)
def test_a_row_under_a_mask_gives_the_token_of_what_the_mask_leaves(
    chosen: list[Sampling], keys: list[int], seed: int, spread: float, share: float
) -> None:
    """Peaks are allowed or not, as all others."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(chosen), VOCABULARY, generator=generator) * spread
    logits[:, torch.randint(0, VOCABULARY, (12,), generator=generator)] += 8.0
    allowed = torch.rand(len(chosen), VOCABULARY, generator=generator) < share
    masks = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    rows = [HostRow(*each[:3], mask=each[3]) for each in zip(logits.numpy(), chosen, keys, masks, strict=False)]
    left = torch.where(allowed, logits, -torch.inf)
    for found in (drawn_from_few(rows, weighed), drawn_from_few(rows)):
        for one, row, token in zip(left, rows, found, strict=True):
            assert token is None or token == int(draw(one[None], [row.sampling], [row.key])[0])


@pytest.mark.parametrize("every", [2, 7])
def test_noise_lifts_nothing_that_a_mask_refuses(every: int) -> None:
    """However much the model prefers it, as one does that may not say what it would; and where hardly any of the
    table's columns has an id that is allowed."""
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2.0
    logits[:, :20] += torch.arange(20) * 0.5 + 4.0
    allowed = torch.arange(VOCABULARY) % every > 0
    left = torch.where(allowed, logits, -torch.inf)
    logits[:, ~allowed] += 20.0
    sampling, mask = Sampling(temperature=1.3), np.packbits(allowed.numpy(), bitorder="little")
    found = drawn_from_few([HostRow(row, sampling, key, mask=mask) for key, row in enumerate(logits.numpy())])
    drawn = [int(draw(one[None], [sampling], [key])[0]) for key, one in enumerate(left)]
    assert found == (drawn if every > 2 else [None] * 40)


def test_what_is_heavy_under_a_mask_is_drawn_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The off-switch of the test above."""
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2.0
    logits[:, :20] += torch.arange(20) * 0.5 + 4.0
    mask = np.packbits(np.arange(VOCABULARY) % 5 > 0, bitorder="little")
    sampling = Sampling(temperature=0.8, top_p=0.95)
    rows = [HostRow(row, sampling, key, mask=mask) for key, row in enumerate(logits.numpy())]
    heavy = weighed([row.logits for row in rows], [mask] * 40, [0.8] * 40)
    monkeypatch.setattr(HostRow, "unmasked", None)
    found = drawn_from_few(rows, lambda *_: heavy)
    assert None not in found and len(set(found)) > 3 and all(token and token % 5 for token in found)


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.95), Sampling(temperature=0.8, top_k=40),
    Sampling(temperature=0.8, min_p=0.05),
], ids=str)  # fmt: skip
def test_rows_as_models_give_them_need_few(sampling: Sampling) -> None:
    """The off-switch of the test above: an answer that is never given would be right, too."""
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2.0
    logits[:, :20] += torch.arange(20) * 0.5 + 4.0
    found = drawn_from_few([HostRow(row, sampling, key) for key, row in enumerate(logits.numpy())])
    assert None not in found and len(set(found)) > 3


def test_a_row_with_a_long_tail_needs_no_more_than_top_p_keeps() -> None:
    """As a model gives it that may not say what it would: all that weighs anything is more than few."""
    logits = torch.randn(6, 20 * VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2.4
    logits[:, :400] = 9.0 + logits[:, :400] / 8
    logits[:, 7] = 17.5
    sampling = Sampling(temperature=1.0, top_p=0.95)
    rows = [HostRow(row, sampling, key) for key, row in enumerate(logits.numpy())]
    heavy = weighed([row.logits for row in rows], [None] * 6, [1.0] * 6)
    weights = torch.softmax(logits.double(), dim=1)
    assert int((weights / weights.amax(1, keepdim=True) >= 0.05 / logits.shape[1]).sum(1).min()) > MOST
    for found in (drawn_from_few(rows), drawn_from_few(rows, lambda *_: heavy)):
        assert found == [int(draw(one[None], [sampling], [key])[0]) for key, one in enumerate(logits)]


def test_a_step_of_greedy_sampled_penalised_and_broken_rows_is_drawn_row_by_row() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3.0
    logits[4, 17] = torch.nan
    bias = torch.zeros(VOCABULARY)
    bias[99] = 100.0
    sampled = Sampling(temperature=0.9, top_p=0.9)
    draws = [
        Draw(indices=range(1), sampler=Sampler(Sampling(), seed=1), position=3),
        Draw(indices=range(1, 3), sampler=Sampler(sampled, seed=2), position=4, drafted=(7,)),
        Draw(indices=range(3, 4), sampler=Sampler(Sampling(), seed=1, bias=bias), position=3),
        Draw(indices=range(4, 5), sampler=Sampler(sampled, seed=1), position=3),
        Draw(indices=range(5, 6), sampler=Sampler(sampled, seed=3), position=9),
    ]
    together = draw_all(logits, draws)
    assert [[sample.is_finite for sample in own] for own in together] == [[True], [True] * 2, [True], [False], [True]]
    assert together[0][0].token_id == int(logits[0].argmax()) and together[2][0].token_id == 99
    for each, own in zip(draws, together, strict=True):
        if own[0].is_finite:
            with_logprob = Draw(
                indices=each.indices,
                sampler=each.sampler,
                position=each.position,
                drafted=each.drafted,
                needs_logprob=True,
            )
            assert [one.token_id for one in draw_all(logits, [with_logprob])[0]] == [one.token_id for one in own]


def test_what_the_kernels_weigh_is_what_numpy_weighs() -> None:
    """At every level and for any width, alone and beside others; and a row that is too flat says so."""
    rows = torch.randn(5, 1007, generator=torch.Generator().manual_seed(4)) * 4.0
    rows[1, 5] = -3e38
    rows[2] = 0.25
    scales = np.array([1.0, 1.25, 1.0, 0.5, 100.0], np.float32)
    numbers = list(rows.numpy())
    weights = np.exp((rows.double().numpy() - rows.amax(1, keepdim=True).double().numpy()) * scales[:, None])
    with library().open_threads(2) as threads:
        for level in library().levels():
            kernels, ids = library().kernels(level), np.empty((5, 200), np.int64)
            found, rest = kernels.weigh(threads, numbers, [None] * 5, scales, ids)
            assert found[2] == 1007 and found[0] < 200
            for row, own, count, weight in zip(weights, ids, found, rest, strict=True):
                heavy = np.flatnonzero(row >= np.exp(-8.0))
                assert count == len(heavy) and own[:200].tolist()[:count] == heavy[:200].tolist()[:count]
                assert weight == pytest.approx(np.delete(row, heavy).sum(), rel=2e-5)
            alone = kernels.weigh(threads, numbers[:1], [None], scales[:1], np.empty((1, 200), np.int64))
            assert alone[1][0] == rest[0]
            bits = np.packbits(np.arange(1007) % 3 > 0, bitorder="little")
            few = np.where(np.arange(1007) % 3 > 0, rows.numpy(), np.float32(-np.inf))
            masked = kernels.weigh(threads, numbers, [None, bits, None, bits, bits], scales, ids)
            by_hand = kernels.weigh(
                threads, [numbers[0], few[1], numbers[2], few[3], few[4]], [None] * 5, scales, ids.copy()
            )
            assert np.array_equal(masked[0], by_hand[0]) and np.array_equal(masked[1], by_hand[1])
