"""Sums over the memory of several ranks: of one rank's kernel, beside others that were earlier."""

from __future__ import annotations

import torch

from tests.kernels.own_process import run_with_triton

RANKS, NUMBERS, CALLS = 3, 3000, 4


def device_of_tests() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def one_rank_of_several() -> None:
    """The others have written all their parts, and set their flags to the last call: this one need not wait."""
    from inference_engine.kernels.triton.rank_sums import BLOCK, SharedRoom

    device, places = device_of_tests(), -(-NUMBERS // BLOCK) * BLOCK
    for own in range(RANKS):
        for dtype in (torch.float32, torch.bfloat16):
            rooms = [torch.randn(2 * places, device=device).to(dtype) for _ in range(RANKS)]
            flags = [torch.full((places // BLOCK, RANKS), CALLS + 1, device=device) for _ in range(RANKS)]
            before = [each.clone() for each in flags]
            of_rooms, of_flags = ([each.data_ptr() for each in memory] for memory in (rooms, flags))
            room = SharedRoom(own, of_rooms, of_flags, places, device)
            for call in range(1, CALLS + 1):
                states = torch.randn(1, NUMBERS - call, device=device).to(dtype)
                place = call % 2 * places
                parts = [each[place : place + states.numel()] for each in rooms]
                parts[own] = states[0]
                width = states.numel() // 3
                if call % 2:
                    first, second, third = (each.float() for each in parts)
                    rounding = torch.finfo(dtype).eps  # which the interpreter does another way
                    torch.testing.assert_close(
                        room.sum(states)[0].float(), first + second + third, rtol=rounding, atol=0.0
                    )
                else:
                    given = states[:, : 3 * width].reshape(3, width)
                    shown = [each[: 3 * width].reshape(3, width) for each in parts]
                    found = room.gather(given)
                    assert torch.equal(found, torch.cat(shown, dim=1))
            for rank in range(RANKS):
                changed = flags[rank] != before[rank]
                assert not changed[:, [other for other in range(RANKS) if other != own]].any()
                if rank != own:
                    assert (flags[rank][:, own] == CALLS).all()


def test_a_rank_adds_up_and_collects_what_all_have_written() -> None:
    run_with_triton(one_rank_of_several)
