"""A Generate as its caller holds it: its events, and the ways to stop it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from inference_engine.errors import DeadlineExceeded, RequestError
from inference_engine.scheduler.loop import Scheduler
from inference_engine.scheduler.transcript import Reader, Transcript
from inference_engine.types import Event, Failed, Finished, StopReason


class Generation:
    """A Generate that runs, or has run. Iterate it for its events, the last of which is Finished; a Failed is raised as
    its error.

    When a newer call attaches to the same Generate, this one ends with StreamTakenOver and stops nothing any more.
    """

    def __init__(self, transcript: Transcript, reader: Reader, scheduler: Scheduler) -> None:
        self._transcript = transcript
        self._reader = reader
        self._scheduler = scheduler

    @property
    def position(self) -> int:
        """Of the next token to be read."""
        return self._reader.position

    def read(self) -> list[Event]:
        """The next events, none if there are none yet; never waits. The last one is Finished or Failed."""
        return self._reader.read()

    def when_news(self, callback: Callable[[], None], wake: Callable[[], None] | None = None) -> None:
        """Call back, from any thread, whenever there may be something to read; now, too. It must return at once.

        wake: called after that. For what a step gives it is called while the device is at work on the next one, and
        once for all who gave an equal one.
        """
        if wake is None:
            self._reader.when_news(callback)
            return
        news = self._scheduler.news

        def tell() -> None:
            callback()
            news.wake(wake)

        self._reader.when_news(tell)

    def leave(self) -> None:
        """Nobody will read it any more: what a closed session keeps for that goes. It stops nothing; idempotent."""
        self._reader.leave()

    def __del__(self) -> None:
        self._reader.leave()

    def cancel(self) -> None:
        """Stop at the next step boundary with Finished(CANCELLED). Idempotent, from any thread."""
        self._stop(lambda: StopReason.CANCELLED)

    def expire(self) -> None:
        """As `cancel`, but the Generate ends with DeadlineExceeded."""
        self._stop(lambda: DeadlineExceeded(len(self._transcript.session.history)))

    def abort(self, error: RequestError) -> None:
        """As `cancel`, but the Generate ends with `error`."""
        self._stop(lambda: error)

    def __iter__(self) -> Iterator[Event]:
        news = threading.Event()
        self.when_news(news.set)
        while True:
            news.wait()
            news.clear()
            while events := self.read():
                for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
                    if isinstance(event, Finished):
                        return

    def _stop(self, how: Callable[[], StopReason | BaseException]) -> None:
        self._transcript.stop(self._reader, how)
        self._scheduler.nudge()
