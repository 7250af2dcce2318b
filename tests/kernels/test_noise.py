"""Noise: what SplitMix64 and Gumbel say, the same for one id as for all, and nothing in common between places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference_engine.kernels.gumbel_noise import key, noise, noise_of_all
from tests.kernels.own_process import run_with_triton
from tests.kernels.plain_noise import GOLDEN, WORD, mixed
from tests.kernels.poisoned import poison


def noise_at(seed: int, position: int, vocab: int = 2000) -> NDArray[np.float64]:
    found: NDArray[np.float64] = noise_of_all(torch.tensor([key(seed, position)]), vocab)[0].numpy()
    return found


def test_what_ours_is_compared_with_mixes_as_splitmix_does() -> None:
    """The first numbers of the published generator, begun with 0."""
    states = np.arange(1, 5, dtype=np.uint64) * np.uint64(GOLDEN)
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert mixed(states).tolist() == known


@pytest.mark.parametrize("vocab", [1, 3, 64, 1001])
def test_one_id_has_the_noise_bit_for_bit_that_it_has_among_all(vocab: int) -> None:
    keys = torch.tensor([key(7, position) for position in range(5)])
    whole = noise_of_all(keys, vocab)
    for place in range(len(keys)):
        assert torch.equal(noise_of_all(keys[place : place + 1], vocab)[0], whole[place])
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:9]
    assert torch.equal(noise(keys[:, None], ids[None]), whole[:, ids])
    for token in ids:
        assert torch.equal(noise(keys[2], token), whole[2, token])


@pytest.mark.parametrize("seed", [0, 1, 2**63, WORD])
def test_noise_has_gumbels_distribution(seed: int) -> None:
    """Over ids at one position, and over positions for one id."""
    for sample in (noise_at(seed, 9), np.array([noise_at(seed, position, 4)[3] for position in range(2000)])):
        counts = np.histogram(np.exp(-np.exp(-sample)), bins=10, range=(0, 1))[0]
        # Chi-square with 9 degrees of freedom; 33.7 is the 0.01 % point.
        assert ((counts - 200) ** 2 / 200).sum() < 33.7


@pytest.mark.parametrize(("bits", "expected"), [(0, -np.log(53 * np.log(2))), (WORD, 53 * np.log(2))])
def test_noise_is_finite_at_both_ends(bits: int, expected: float) -> None:
    """Nothing is mixed into a key by id 0, so it can be chosen such that these bits come out."""
    chosen = unmixed(bits)
    assert int(mixed(np.array([chosen], dtype=np.uint64))[0]) == bits
    signed = chosen - (1 << 64) if chosen >> 63 else chosen
    assert float(noise(torch.tensor(signed), torch.tensor(0))) == pytest.approx(expected)


def unmixed(word: int) -> int:
    """Backwards through the mixing: a shift is undone bit by bit from above, a factor by its inverse."""
    word = unshifted(word, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & WORD
    word = unshifted(word, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & WORD
    return unshifted(word, 30)


def unshifted(word: int, count: int) -> int:
    found = word
    for _ in range(64 // count):
        found = word ^ (found >> count)
    return found


def compare_kernel() -> None:
    """Triton's against plain torch: the same bits of whole numbers, logarithms but for their last bits."""
    from inference_engine.kernels.triton import gumbel_noise as module

    poison(module)
    in_triton = module.noise_of_all
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    places = ((0, 0), (7, 1), (WORD, 2**40), (0, 2**40))
    keys = torch.tensor([key(seed, position) for seed, position in places], device=device)
    for vocab in (1, 1023, 1024, 2500):
        found = in_triton(keys, vocab)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, noise_of_all(keys, vocab), rtol=1e-12, atol=1e-12)
        assert torch.equal(in_triton(keys[3:4], vocab)[0], found[3])


def test_the_kernel_gives_what_the_reference_gives() -> None:
    run_with_triton(compare_kernel)
