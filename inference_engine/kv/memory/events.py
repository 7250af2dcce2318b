"""Points in a device's work that the host can wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch

Wait = Callable[[], None]


def mark(device: torch.device) -> Wait:
    """What waits until the device has done all it was asked to until now. A CPU has, whenever it is asked."""
    if device.type != "cuda":
        return lambda: None
    new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
    event = new_event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
