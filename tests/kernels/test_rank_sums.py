"""Sums over the memory of several ranks: of one rank's kernel, beside others that were earlier."""

from __future__ import annotations

import torch

from tests.kernels.own_process import run_with_triton

RANKS, NUMBERS, CALLS = 3, 3000, 5


def device_of_tests() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def one_rank_of_several() -> None:
    """The others have written all their parts of a call before it: this one need not wait."""
    from inference_engine.kernels.triton.rank_sums import ABSENT, BLOCK, PLACES, SharedRoom, room_numbers

    device, most = device_of_tests(), -(-NUMBERS // BLOCK) * BLOCK
    for own, dtype, whole in ((0, torch.float32, torch.int32), (1, torch.bfloat16, torch.int16)):
        rooms = [torch.full((room_numbers(RANKS, most),), ABSENT, dtype=whole, device=device) for _ in range(RANKS)]
        sets = [each.view(PLACES, RANKS, most // BLOCK, BLOCK) for each in rooms]  # by rank, which others write
        room = SharedRoom(own, [each.data_ptr() for each in rooms], most, device)
        calls = [0] * (most // BLOCK)
        others = [rank for rank in range(RANKS) if rank != own]
        for call in range(CALLS):
            # Of other sizes: what an earlier call left must be gone. NaN with the bits of ABSENT is a number, too.
            width = (NUMBERS - 700 * (call % 3)) // 3
            blocks = -(-3 * width // BLOCK)
            parts = [torch.randn(3, width, device=device).to(dtype) for _ in range(RANKS)]
            parts[own].view(whole)[0, 5] = ABSENT
            for rank in others:
                sent = torch.full((blocks * BLOCK,), ABSENT, dtype=whole, device=device)
                sent[: 3 * width] = parts[rank].view(whole).flatten()
                for block in range(blocks):
                    sets[own][calls[block] % PLACES, rank, block] = sent[block * BLOCK :][:BLOCK]
            if call % 2:
                found, expected = room.gather(parts[own]), torch.cat(parts, dim=1)
            else:
                whole_sum = sum((each.float() for each in parts[1:]), parts[0].float())
                found, expected = room.sum(parts[own]), whole_sum.to(dtype)
            rounding = torch.finfo(dtype).eps  # which the interpreter does another way
            torch.testing.assert_close(found, expected, rtol=rounding, atol=0.0, equal_nan=True)
            for rank in others:
                places = [sets[rank][calls[block] % PLACES, own, block] for block in range(blocks)]
                arrived = torch.cat(places)[: 3 * width]
                assert not (arrived == ABSENT).any()
                torch.testing.assert_close(arrived.view(dtype), parts[own].flatten(), rtol=0, atol=0, equal_nan=True)
                for block, place in enumerate(places):
                    place.fill_(ABSENT)  # as that one does
                    assert (sets[own][(calls[block] - 1) % PLACES, rank, block] == ABSENT).all()
            calls = [count + (block < blocks) for block, count in enumerate(calls)]


def test_a_rank_adds_up_and_collects_what_all_have_written() -> None:
    run_with_triton(one_rank_of_several)
