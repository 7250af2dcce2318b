"""A Generate as its caller holds it: its events, and the ways to stop it."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from inference_engine.errors import DeadlineExceeded, RequestError
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.request import Request
from inference_engine.types import Event, Failed, Finished, StopReason


class Generation:
    """A running Generate. Iterate it for its events, the last of which is Finished; a Failed is raised as its error.

    With a listener, events go there instead and there is nothing to iterate.
    """

    def __init__(self, request: Request, scheduler: Scheduler, events: queue.SimpleQueue[Event] | None) -> None:
        self._request = request
        self._scheduler = scheduler
        self._events = events

    def cancel(self) -> None:
        """Stop at the next step boundary with Finished(CANCELLED). Idempotent, from any thread."""
        self._request.ask_to_stop(lambda: StopReason.CANCELLED)
        self._scheduler.nudge()

    def expire(self) -> None:
        """As `cancel`, but the Generate ends with DeadlineExceeded."""
        self._request.ask_to_stop(lambda: DeadlineExceeded(len(self._request.session.history)))
        self._scheduler.nudge()

    def abort(self, error: RequestError) -> None:
        """As `cancel`, but the Generate ends with `error`."""
        self._request.ask_to_stop(lambda: error)
        self._scheduler.nudge()

    def __iter__(self) -> Iterator[Event]:
        assert self._events is not None, "the events of this Generate go to its listener"
        while True:
            event = self._events.get()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return
