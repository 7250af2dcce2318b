"""What a recorded step begins and ends with: the kernels give what plain torch gives, for any logits."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from inference_engine.kernels.filters import draw
from inference_engine.kernels.graph_io import PLAIN_ENDS, KeyedRows, Peaks, StepEnds
from inference_engine.kernels.gumbel_noise import keys_of
from inference_engine.kernels.transfer import on_device
from inference_engine.types import Sampling
from tests.kernels.own_process import run_with_triton


def device_of_tests() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def host_memory(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.pin_memory() if torch.cuda.is_available() else numbers


def published(
    ends: StepEnds, peaks: Peaks, count: int, scores: torch.Tensor | None = None
) -> tuple[list[int], list[int], torch.Tensor]:
    """The ids on the device, those on the host, and the smallest and the largest numbers."""
    host = host_memory(torch.full((4 * count,), 7.0))
    ids = ends.publish(peaks, count, host, scores)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert (ids.dtype, ids.shape) == (torch.int64, (count,))
    return ids.tolist(), host[: 2 * count].view(torch.int64).tolist(), host[2 * count :].view(2, count)


def rows(vocab: int) -> torch.Tensor:
    """Random ones, equals, and what is not finite, in the first part and in the last."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1] = 0.5
    logits[2, vocab // 2 :] = logits[2].max() + 1
    logits[3, -1] = torch.nan
    logits[4, 0] = torch.inf
    logits[5, vocab // 3] = -torch.inf
    logits[6] = torch.nan
    logits[7] = -torch.inf
    return logits


def compare_draws() -> None:
    """What the kernel draws, and what the reference of each row alone: of all ids, of those that masks allow, and of
    the largest, whatever is beside them."""
    from inference_engine.kernels.triton.graph_io import step_ends

    device = device_of_tests()
    warm = [Sampling(temperature=each, min_p=least) for each in (0.3, 2.5) for least in (0.0, 0.2)]
    unranked = [
        *warm,
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, min_p=1.0),
        *[Sampling(temperature=1.0)] * 3,
    ]
    ranked = [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_p=0.3),
        Sampling(temperature=0.7, top_p=0.4),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_p=0.8, min_p=0.3),
        Sampling(temperature=0.0, top_p=0.5),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=0.4, top_p=0.999),
        Sampling(temperature=2.5, top_p=0.95, min_p=0.05),
    ]
    for vocab in (1, 5, 4097, 9001):
        logits = rows(vocab).to(device)
        count, rng = len(logits), np.random.default_rng(vocab)
        keys = on_device(keys_of(np.arange(count, dtype=np.uint64), np.array([7], dtype=np.uint64)), device)
        bits = rng.random((count, -(-vocab // 32) * 32)) < 0.3
        bits[range(count), rng.integers(0, vocab, count)] = True
        allowed = host_memory(torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)))
        finite = logits.isfinite().all(dim=-1).tolist()
        rounded = logits.bfloat16().float()  # of which many are equal
        for mask, samplings, given in itertools.product((None, allowed), (unranked, ranked), (logits, rounded)):
            kept = given
            if mask is not None:
                kept = given.masked_fill(~torch.from_numpy(bits[:, :vocab]).to(device), -torch.inf)
            expected = [
                int(kept[row].argmax() if each.is_greedy else draw(kept[row : row + 1], [each], [int(keys[row])]))
                for row, each in enumerate(samplings)
            ]
            for ends, some in itertools.product((step_ends, PLAIN_ENDS), (2, count)):
                own = KeyedRows.of(samplings[:some], keys[:some])
                peaks, scores = ends.draw(given, ends.peaks(given, mask), own, mask)
                ids, on_host, extremes = published(ends, peaks, some, scores)
                assert ids == on_host and all(0 <= token < vocab for token in ids)
                assert extremes.isfinite().all(dim=0).tolist() == finite[:some]
                assert [ids[row] for row in range(some) if finite[row]] == [
                    expected[row] for row in range(some) if finite[row]
                ]


def test_tokens_are_drawn_as_each_row_alone() -> None:
    run_with_triton(compare_draws)


def compare_ends() -> None:
    from inference_engine.kernels.triton.graph_io import step_ends

    device = device_of_tests()
    for vocab in (1, 5, 4096, 4097, 9001):
        logits = rows(vocab).to(device)
        for given in (logits, logits[:, : max(1, vocab - 1)]):
            for count in (1, len(logits)):
                kept = given[:count]
                found = published(step_ends, step_ends.peaks(given), count)
                expected = published(PLAIN_ENDS, PLAIN_ENDS.peaks(given), count)
                assert found[0] == found[1] and expected[0] == expected[1]
                assert all(0 <= token < given.shape[1] for token in found[0])
                finite = kept.isfinite().all(dim=-1).cpu()
                assert torch.equal(found[2].isfinite().all(dim=0), finite)
                assert torch.equal(expected[2].isfinite().all(dim=0), finite)
                for row in range(count):
                    if finite[row]:
                        assert found[0][row] == expected[0][row] == int(kept[row].argmax())
                        assert torch.equal(found[2][:, row], expected[2][:, row])
        compare_allowed(step_ends, logits)
    for count, known in ((1, 0), (1, 1), (700, 3), (40_000, 64)):
        numbers = host_memory(torch.arange(count))
        fed = -1 - torch.arange(known, device=device) if known else None
        target = torch.full((count + 2,), 99, device=device)
        step_ends.bring(numbers, target[:count], fed)
        expected_numbers = torch.arange(count)
        expected_numbers[:known] = -1 - torch.arange(known)
        assert target.tolist() == [*expected_numbers.tolist(), 99, 99]


def compare_allowed(ends: StepEnds, logits: torch.Tensor) -> None:
    """Of what may be drawn: one id, few, most. What is not finite is seen, allowed or not."""
    count, vocab = logits.shape
    rng = np.random.default_rng(vocab)
    for share in (0.0, 0.1, 0.9):
        bits = rng.random((count, -(-vocab // 32) * 32)) < share
        bits[range(count), rng.integers(0, vocab, count)] = True
        allowed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
        kept = torch.from_numpy(bits[:, :vocab])
        expected = torch.where(kept, logits.cpu(), -torch.inf).argmax(dim=-1)
        finite = logits.isfinite().all(dim=-1).cpu()
        for each in (ends, PLAIN_ENDS):
            ids, _, extremes = published(each, each.peaks(logits, host_memory(allowed)), count)
            assert torch.equal(extremes.isfinite().all(dim=0), finite)
            assert all(0 <= token < vocab for token in ids)
            assert [ids[row] for row in range(count) if finite[row]] == expected[finite].tolist()


def test_the_kernels_give_what_the_references_give() -> None:
    run_with_triton(compare_ends)


def test_of_parts_the_lower_one_of_equals_counts_and_nan_anywhere_is_seen() -> None:
    peaks = Peaks(
        torch.tensor([[3, 11, 20], [3, 11, 20]]),
        torch.tensor([[1.0, 5.0, 5.0], [1.0, 2.0, 3.0]]),
        torch.tensor([[-1.0, -7.0, 0.0], [0.0, torch.nan, 0.0]]),
    )
    ids, on_host, extremes = published(PLAIN_ENDS, peaks, 2)
    assert ids == on_host == [11, 20]
    assert extremes[:, 0].tolist() == [-7.0, 5.0]
    assert extremes[0, 1].isnan()
