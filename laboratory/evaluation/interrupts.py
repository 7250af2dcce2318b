"""What ends a job that is out of time, as Ctrl-C would."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP are a KeyboardInterrupt: a job that is out of time may keep what it has."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in caught:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
