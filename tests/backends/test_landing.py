"""Memory that a device writes to is not written to again before it was read."""

from __future__ import annotations

import torch

from inference_engine.backends.landing import Landing

CPU = torch.device("cpu")


class Done:
    """An event of a device that comes when a test lets it come."""

    def __init__(self) -> None:
        self.has_come = False
        self.waited = 0

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.waited += 1


def test_a_piece_is_used_again_once_it_was_written_and_is_held_no_more() -> None:
    events: list[Done] = []

    def now(_device: torch.device) -> Done:
        events.append(Done())
        return events[-1]

    landing = Landing(torch.empty, now)
    first = landing.take(4, CPU, lambda memory: memory.fill_(1.0))
    second = landing.take(4, CPU, lambda memory: memory.fill_(2.0))
    addresses = [piece.memory.data_ptr() for piece in (first, second)]
    assert addresses[0] != addresses[1]
    del first  # given up before the device wrote it
    third = landing.take(4, CPU, lambda memory: memory.fill_(3.0))
    assert third.memory.data_ptr() not in addresses
    events[0].has_come = events[1].has_come = True
    fourth = landing.take(2, CPU, lambda memory: memory.fill_(4.0))
    assert fourth.memory.data_ptr() == addresses[0]
    second.wait()
    assert (events[1].waited, second.memory.tolist(), fourth.memory.tolist()) == (1, [2.0] * 4, [4.0] * 2)
    large = landing.take(10_000, CPU, lambda memory: memory.fill_(5.0))
    assert len(large.memory) == 10_000
