"""Logging: lines of text or JSON, each with short hashes of the session and the call that it is about.

    2026-11-21 14:02:11,120 INFO inference_engine.scheduler.lifecycle: a Generate ended session=5f0c… request=91ab… …
    {"time": "2026-11-21T14:02:11.120Z", "level": "INFO", "logger": "…", "message": "a Generate ended", "session": …}

Besides the message, a line has the fields in `FIELDS` and nothing else: no token ids, keys, ids or labels. A separate
thread writes the lines, so that a blocked output blocks no other thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from inference_engine.tracing import current_trace_id, describe

TAG_CHARACTERS = 12
# The fields of a line, in this order.
FIELDS = ("session", "request", "trace_id", "owner", "method", "reason", "incident", "outcome", "tokens", "seconds")
_QUEUED_LINES = 10_000
_LAST_LINES_SECONDS = 5.0  # to write what is left when the process ends

# Lost lines since the process began, by cause.
LOST_REASONS = ("queue", "write")
_lost = dict.fromkeys(LOST_REASONS, 0)

_request: ContextVar[str] = ContextVar("request", default="")


def tag(identifier: str | bytes) -> str:
    """A short hash by which an id can be found in logs and traces: `printf %s ID | sha256sum | cut -c1-12`."""
    data = identifier.encode() if isinstance(identifier, str) else identifier
    return hashlib.sha256(data).hexdigest()[:TAG_CHARACTERS]


def lost_lines() -> Mapping[str, int]:
    """Log lines lost since the process began, by LOST_REASONS."""
    return dict(_lost)


@contextmanager
def about_request() -> Iterator[None]:
    """Log lines of this task within this block belong to one call and carry its tag."""
    token = _request.set(secrets.token_hex(TAG_CHARACTERS // 2))
    try:
        yield
    finally:
        _request.reset(token)


def name_request(request_id: bytes) -> None:
    """Tag the current call with the hash of its client's request id."""
    _request.set(tag(request_id))
    describe(request=_request.get())


def about_session(session_id: str) -> dict[str, str]:
    """The `extra` of a log record about this session. Any thread."""
    return {"session": tag(session_id), **_current()}


def unexplained(error: BaseException) -> BaseException | None:
    """`error`, for the traceback in a line of the log; None of an error of the system, whose text says all."""
    return None if isinstance(error, OSError) else error


@contextmanager
def written(kind: str, stream: TextIO | None = None, *, queued_lines: int = _QUEUED_LINES) -> Iterator[None]:
    """Within this block everything from INFO on goes to `stream`, standard error by default. kind: text or json."""
    handler = _BackgroundHandler(stream or sys.stderr, queued_lines)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


class TextFormatter(logging.Formatter):
    """One line for people, the fields at its end, a traceback below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class names it
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    """The fields of a record; missing ones come from the call that it was made in."""
    facts = {**_current(), **vars(record)}
    return {name: facts[name] for name in FIELDS if facts.get(name) not in (None, "")}


def _current() -> dict[str, str]:
    now = {"request": _request.get(), "trace_id": current_trace_id()}
    return {name: value for name, value in now.items() if value}


class _BackgroundHandler(logging.Handler):
    """Formats in the calling thread and writes in another. Lines that come faster than they can be written, and lines
    whose write fails, are lost: they are counted, and reported in a line when writing works again."""

    def __init__(self, stream: TextIO, queued_lines: int) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(queued_lines)
        self._dropped = 0  # lines that did not fit the queue; `emit` counts them, only the writer reports them
        self._reported_dropped = 0
        self._failed = 0  # lines whose write failed
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
            _lost["queue"] += 1
        except Exception:  # noqa: BLE001 - as logging does it: a record that cannot be formatted raises no error in its caller
            self.handleError(record)

    def close(self) -> None:
        """Write what is left, for a few seconds at most."""
        if self._writer.is_alive():
            try:
                self._lines.put(None, timeout=_LAST_LINES_SECONDS)
            except queue.Full:
                return
            self._writer.join(_LAST_LINES_SECONDS)
        super().close()

    def _write(self) -> None:
        line: str | None = ""
        while line is not None:
            line = self._lines.get()
            if line is not None and not self._put(line):
                self._failed += 1
                _lost["write"] += 1
                continue
            if line is None or self._lines.empty():
                self._report_lost()

    def _put(self, line: str) -> bool:
        """Whether the line was written. A full disk may have room again; a closed stream only loses lines."""
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return False
        return True

    def _report_lost(self) -> None:
        """Report lost lines, once each."""
        dropped, failed = self._dropped - self._reported_dropped, self._failed
        how = "lines of the log were dropped: they came faster than they are read"
        if dropped and self._put(self._reported(f"{dropped} {how}")):
            self._reported_dropped += dropped
        if failed and self._put(self._reported(f"{failed} lines of the log were lost: writing them failed")):
            self._failed = 0

    def _reported(self, text: str) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None))
