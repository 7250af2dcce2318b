"""How a command begins and ends as a process: its standard streams, the signals that stop it, errors in one line.

| what happens | the process |
|---|---|
| a standard stream is closed from the start | reads the end of its input there; what it writes there is discarded |
| Ctrl-C | ends what it began; status 130 |
| SIGTERM, and SIGHUP unless it is ignored, as under nohup | ends what it began, then ends by that signal |
| the reader of its output has left | ends without a word; status 141 |
| the folder that it is started in is gone | one line on standard error; status 1 |
| it gets no memory or threads, or a file or its output cannot be used | one line on standard error; status 1 |
| standard error cannot be written, as a log on a full disk | goes on without it |
| its output is a pipe that is full and not read | a server serves; other commands wait |

`serve` takes the signals over when it serves (`server/run.py`). What no line here explains is our mistake, and shows
its traceback. This module imports little, so that it is in force before the commands are imported.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 1
INTERRUPTED = 128 + signal.SIGINT
READER_LEFT = 128 + signal.SIGPIPE

# Some are the system's; those that are our mistakes are raised again.
SYSTEM_ERRORS = (OSError, UnicodeError, MemoryError, ImportError, RuntimeError)

_STOPPING = (signal.SIGTERM, signal.SIGHUP)
# The name that errors of standard output are given: what an error number means depends on whose it is.
_OUTPUT = "standard output"
# Of pipes and sockets, and of a terminal that was closed.
_NO_READER = (errno.EPIPE, errno.ECONNRESET, errno.EIO)
# What starts processes and threads: there EAGAIN means that there are too many.
_STARTING = ("subprocess", "multiprocessing", "threading")
_NO_THREADS = "no more threads can be started: raise the limit (ulimit -u, or that of the container on processes)"
_NO_MEMORY = "; the limit on memory (ulimit -v, or the container's) leaves no room for it"
_STDOUT = 1
# Python's name, access and descriptor of each standard stream.
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class Stopped(SystemExit):
    """One of _STOPPING came. Raised in the main thread, so that `with` and `finally` end what was begun."""

    first: Stopped | None = None  # that came to this process

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def end_if_stopped() -> None:
    """Raise Stopped if it was raised before: Python loses exceptions that come while it compiles a module. To be called
    after imports, by what goes on for long."""
    if Stopped.first is not None:
        raise Stopped.first


def run(command: Callable[[], int]) -> int:
    """The exit status of `command`, with this process's streams and signals as above. Does not return if stopped."""
    _open_streams()
    try:
        Path.cwd()
    except OSError as error:  # libraries that compute end the process for it
        say(f"kakeya: the current folder cannot be used ({error.strerror}); change to another, and start again")
        return FAILED
    for number in _STOPPING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    stopped = None
    try:
        status = command()
    except SYSTEM_ERRORS as error:
        status = failed("kakeya", error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as asked:
        stopped = asked if isinstance(asked, Stopped) else None
        status = int(asked.code or 0)
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the interpreter ends
    status = _write_out("kakeya") or status
    if stopped is not None:
        signal.signal(stopped.number, signal.SIG_DFL)
        os.kill(os.getpid(), stopped.number)  # without effect on the first process of a container
    return status


def failed(command: str, error: Exception) -> int:
    """Say what an error of the system means, and return the exit status. Raises any other."""
    if _is_unread(error):
        return READER_LEFT
    if isinstance(error, OSError) and (status := _write_out(command)):
        return status
    if not (said := explained(error)):
        raise error
    say(f"{command}: {said}")
    return FAILED


def need_threads(count: int) -> None:
    """Raises RuntimeError if not so many more can be started: libraries that compute and connect end the process then,
    and only at the first call."""
    is_over, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=is_over.wait, daemon=True)
            thread.start()
            started.append(thread)
    finally:
        is_over.set()
        for thread in started:
            thread.join()


def say(line: str) -> None:
    """On standard error, if it is read."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """Standard output, whose errors say that they are its."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, _OUTPUT) from None


class _Prompt(io.BufferedWriter):
    """For output that is to be unbuffered (PYTHONUNBUFFERED): what a full pipe takes in parts is written whole."""

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self.flush()
        return count


class _BestEffort(io.FileIO):
    """Discards what cannot be written now."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def progress() -> Console:
    """Where a command shows what it is at, on standard error. No command ends because that cannot be written."""
    from rich.console import Console

    try:
        raw = _BestEffort(sys.stderr.fileno(), "w", closefd=False)
    except OSError:  # it is no file
        return Console(stderr=True)
    return Console(file=io.TextIOWrapper(io.BufferedWriter(raw), sys.stderr.encoding, "backslashreplace"))


def announce(line: str) -> OSError | None:
    """On standard output. The error if that cannot be written, in which case later output is discarded."""
    try:
        print(line)
    except OSError as error:  # it is not buffered
        return error
    return _written_out(sys.stdout)


def announce_aside(line: str, on_failure: Callable[[OSError], object]) -> None:
    """On standard output, by a thread of its own: a pipe that is full and not read holds up who writes into it."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # it is no file
        print(line, flush=True)
        return

    def write() -> None:  # not through Python's object, whose lock would be held when the interpreter ends
        left = f"{line}\n".encode(sys.stdout.encoding, "backslashreplace")
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            _discard(sys.stdout)
            on_failure(error)

    threading.Thread(target=write, name="ready-line", daemon=True).start()


def explained(error: Exception) -> str:
    """What an error of the system means; "" of any other."""
    match error:
        case RuntimeError() if "can't start new thread" in str(error):
            return _NO_THREADS
        case OSError() if error.filename == _OUTPUT or hasattr(error, "characters_written"):
            return _unwritten(error)
        case OSError(errno=errno.EAGAIN, filename=None) if _is_starting(error):
            return f"{error.strerror}: {_NO_THREADS}"
        case OSError(errno=errno.EMFILE):
            return f"{error.strerror}: raise the limit (ulimit -n)"
        case ImportError(path=str(path)) if ".so" in path:
            return f"a library cannot be loaded: {error}{_NO_MEMORY if 'map segment' in str(error) else ''}"
        case OSError(filename=None):
            reason = error.strerror or str(error)
            return f"{reason}; name one with TMPDIR" if "temporary directory" in reason else reason
        case OSError():
            return f"{error.filename}: {error.strerror}"
        case UnicodeError():
            return f"text in another encoding than its own: {error}"
        case MemoryError():
            return str(error) or "there is not enough memory"
    return ""


def _open_streams() -> None:
    """Give every standard stream a descriptor of its own: the next file or socket would get that of a closed one."""
    for number, (name, access) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, "streams are opened in order, and a new descriptor is the lowest"
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, access, encoding="utf-8", closefd=False))
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    # A character that a terminal's encoding lacks is no reason to end; standard error escapes it already.
    is_lacking = out.errors == "strict" or codecs.lookup(out.encoding).name != "utf-8"
    errors = "backslashreplace" if is_lacking else out.errors
    raw = getattr(out.buffer, "raw", out.buffer)
    if isinstance(raw, io.FileIO) and raw.fileno() == _STDOUT:
        out.flush()
        lines, through = out.line_buffering, out.write_through
        kind = _Prompt if raw is out.buffer else io.BufferedWriter
        buffer = kind(_Output(_STDOUT, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffer, out.encoding, errors, line_buffering=lines, write_through=through)
    else:
        out.reconfigure(errors=errors)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    # The next one ends the process at once. A closed terminal sends SIGHUP more than once, and after SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Stopped.first = Stopped(number)
    raise Stopped.first


def _write_out(command: str) -> int:
    """Write what is buffered. 0, or the exit status if that fails, which Python would report at its end."""
    failed = _written_out(sys.stdout)
    if failed is not None and not _is_unread(failed):
        say(f"{command}: {_unwritten(failed)}")
    _written_out(sys.stderr)
    return 0 if failed is None else READER_LEFT if _is_unread(failed) else FAILED


def _unwritten(error: OSError) -> str:
    is_full = isinstance(error, BlockingIOError)
    reason = "it is full, and set not to wait for its reader; write into a file" if is_full else error.strerror
    return f"{_OUTPUT} cannot be written: {reason}"


def _is_starting(error: Exception) -> bool:
    """Was a process or a thread being started?"""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _STARTING:
            return True
        at = at.tb_next
    return False


def _is_unread(error: Exception) -> bool:
    """The reader of standard output has left, or the terminal that is read or written is gone."""
    if not isinstance(error, OSError) or error.errno not in _NO_READER:
        return False
    return error.filename == _OUTPUT or (error.filename is None and error.errno == errno.EIO and _lost_terminal())


def _lost_terminal() -> bool:
    """Is a standard stream a terminal that was closed? EIO may as well be a disk's."""
    for number in range(len(_STREAMS)):
        try:
            termios.tcgetattr(number)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def _written_out(stream: TextIO) -> OSError | None:
    """The error if what is buffered cannot be written, which then is discarded."""
    try:
        stream.flush()
    except OSError as error:
        _discard(stream)
        return error
    return None


def _discard(stream: TextIO) -> None:
    """What is buffered, and what comes."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
