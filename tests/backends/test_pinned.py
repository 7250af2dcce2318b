"""Numbers sent to a device that copies later are those that were sent, however soon the next come; memory that a device
writes to is not written to again before it was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.pinned import Landing, Numbers, Outbox

CPU = torch.device("cpu")


class LateDevice:
    """Copies when the host waits for it, in the order in which it was asked to."""

    def __init__(self) -> None:
        self.asked: deque[tuple[Target, Tensor]] = deque()
        self.received: list[list[int]] = []
        self.waited = 0

    def mark(self, _device: torch.device) -> Callable[[], None]:
        until = len(self.received) + len(self.asked)

        def wait() -> None:
            self.waited += until > len(self.received)
            while len(self.received) < until:
                self.copy()

        return wait

    def copy(self) -> None:
        _target, source = self.asked.popleft()
        self.received.append(source.tolist())


class Target:
    """A tensor of the device."""

    device = CPU

    def __init__(self, device: LateDevice, count: int) -> None:
        self._device, self._count = device, count

    def __len__(self) -> int:
        return self._count

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._device.asked.append((self, source))


def outbox(device: LateDevice) -> Outbox:
    return Outbox(lambda count: torch.full((count,), -1), device.mark)


def send(box: Outbox, device: LateDevice, *parts: Numbers) -> None:
    target = Target(device, sum(part.size for part in parts))
    box.send(parts, cast("Tensor", target))


def test_what_leaves_is_what_was_sent_though_the_sender_goes_on_at_once() -> None:
    device = LateDevice()
    box = outbox(device)
    sent: list[list[int]] = []
    numbers = np.zeros(9, dtype=np.int64)
    for count in (3, 9, 1, 4, 9, 2, 2):
        numbers[:count] = np.arange(count) + 10 * len(sent)
        sent.append(numbers[:count].tolist())
        send(box, device, numbers[:count])
        numbers[:] = 77  # the sender's own from here on
    while device.asked:
        device.copy()
    assert device.received == sent


def test_the_host_gets_two_copies_ahead_and_waits_for_no_more_than_it_has_to() -> None:
    device = LateDevice()
    box = outbox(device)
    for _ in range(2):
        send(box, device, np.arange(4))
    assert device.waited == 0
    send(box, device, np.arange(4))
    assert (device.waited, len(device.received)) == (1, 1)
    while device.asked:
        device.copy()
    for _ in range(2):
        send(box, device, np.arange(4))
    assert device.waited == 1


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
