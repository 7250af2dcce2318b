"""Copies of pinned host memory to a GPU, one piece ahead of the work that reads them.

    copies     | piece 0 | piece 1 | ......... piece 2 | ......... piece 3        a stream of their own
    work       | ......... | reads 0 | reads 1 ........ | reads 2 .........       the current stream

There are two places, used in turn: a piece is copied to a place once what read the piece before it there is done. So
however far the host is ahead of the device, two pieces are there at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_PLACES = 2


class _InboundRoom:
    def __init__(self) -> None:
        new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.is_copied, self.is_read = new_event(), new_event()


class Inbound:
    """For one device. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._device = device
        self._stream = new_stream(device)
        self._places = tuple(_InboundRoom() for _ in range(_PLACES))
        self._next = 0
        self._started: deque[tuple[_InboundRoom, Tensor]] = deque()
        self._taken: _InboundRoom | None = None

    def start(self, sources: Sequence[Tensor], after: torch.cuda.Event | None = None) -> None:
        """Copy tensors of one shape, contiguous each, once `after` has come.

        At most one piece may be started and not taken.
        """
        assert not self._started
        place = self._places[self._next]
        self._next = (self._next + 1) % _PLACES
        dtype, shape = sources[0].dtype, (len(sources), *sources[0].shape)
        nbytes = sum(source.nbytes for source in sources)
        if len(place.memory) < nbytes:
            # Memory belongs to the current stream: it is given back after the last copy to it, and taken after all that
            # it was used for before.
            current = torch.cuda.current_stream(self._device)
            current.wait_event(place.is_copied)
            place.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            place.is_read.record(current)
        target = place.memory[:nbytes].view(dtype).view(shape)
        self._stream.wait_event(place.is_read)
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for part, source in zip(target, sources, strict=True):
                part.copy_(source, non_blocking=True)
        place.is_copied.record(self._stream)
        self._started.append((place, target))

    def take(self) -> Tensor:
        """The piece that was started, [sources, ...]: for what the current stream is given before the next `finish`."""
        self.finish()
        self._taken, target = self._started.popleft()
        torch.cuda.current_stream(self._device).wait_event(self._taken.is_copied)
        return target

    def finish(self) -> None:
        """What reads the piece taken last is launched."""
        if self._taken is not None:
            self._taken.is_read.record(torch.cuda.current_stream(self._device))
            self._taken = None

    def forget(self) -> None:
        """A piece that was started will not be taken."""
        self.finish()
        self._started.clear()
