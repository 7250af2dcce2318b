"""Numbers sent to a device that copies later: what leaves is what was sent, however soon the next comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.outbox import Numbers, Outbox

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


def test_parts_come_one_after_another_whatever_their_shapes() -> None:
    device = LateDevice()
    box = outbox(device)
    send(box, device, np.array([[1, 2], [3, 4]]).T, np.array([5]), np.zeros((0, 3), dtype=np.int64))
    device.copy()
    assert device.received == [[1, 3, 2, 4, 5]]


def test_numbers_that_do_not_fill_their_target_are_a_mistake_of_ours() -> None:
    target = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(AssertionError):
        Outbox(lambda count: torch.zeros(count, dtype=torch.int64), lambda _: lambda: None).send([np.arange(2)], target)


def test_a_real_tensor_gets_the_numbers() -> None:
    target = torch.zeros(3, dtype=torch.int64)
    box = Outbox(lambda count: torch.zeros(count, dtype=torch.int64), lambda _: lambda: None)
    box.send([np.arange(2), np.array([9])], target)
    assert target.tolist() == [0, 1, 9]
