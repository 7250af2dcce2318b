"""Points in a device's work that the host can wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch

Wait = Callable[[], None]


def mark(device: torch.device) -> Wait:
    """A function that waits until the device has done all work launched so far. A CPU always has."""
    return event_now(device).synchronize if device.type == "cuda" else lambda: None


def event_now(device: torch.device) -> torch.cuda.Event:
    """What has come when a GPU has done all work launched so far."""
    new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
    event = new_event()
    event.record(torch.cuda.current_stream(device))
    return event
