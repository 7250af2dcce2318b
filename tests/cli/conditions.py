"""`kakeya` as a process in a condition that is rare at a desk: the first argument names it, the rest is the command."""

from __future__ import annotations

import errno
import os
import pwd
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn
from unittest.mock import patch

import apsw

from inference_engine.config import child_environment
from tests.session.faulty_disk import FaultyDisk

PROGRAM = "inference_engine.cli.main"
HOMES = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


NAMES = ("stdin", "stdout", "stderr")


def unread(*descriptors: int) -> None:
    """Their readers have left already."""
    for number in descriptors:
        read, write = os.pipe()
        os.close(read)
        becomes(number, write)


def becomes(descriptor: int, opened: int) -> None:
    """With an object of Python's as at its start."""
    os.dup2(opened, descriptor)
    os.close(opened)
    setattr(sys, NAMES[descriptor], os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))


def unread_and_full() -> None:
    """A full pipe whose reader does not read."""
    read, write = os.pipe()
    LASTING.callback(os.close, read)
    os.set_blocking(write, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(write, bytes(size))
    os.set_blocking(write, True)
    becomes(1, write)


def in_ascii() -> None:
    """As in the locale C, of systems without another."""
    sys.stdout = os.fdopen(1, "w", encoding="ascii", errors="surrogateescape", closefd=False)


def closed(*descriptors: int) -> None:
    for number in descriptors:
        setattr(sys, NAMES[number], None)
        os.close(number)


@contextmanager
def without_a_home() -> Iterator[None]:
    """For a user that has a number alone, as containers are given."""
    left = {name: value for name, value in child_environment().items() if name not in HOMES}
    unknown = patch.object(pwd, "getpwuid", side_effect=KeyError("getpwuid(): uid not found: 12345"))
    with patch.dict("os.environ", left, clear=True), unknown:
        yield


def without_a_place_for_temporary_files() -> None:
    def refused() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

    patch.object(tempfile, "gettempdir", refused).start()
    patch.object(tempfile, "mkdtemp", lambda *_, **__: refused()).start()


def in_a_folder_that_is_gone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


LASTING = ExitStack()  # as long as the process
CONDITIONS: dict[str, Callable[[], object]] = {
    "as usual": lambda: None,
    "output unread": lambda: unread(1),
    "errors unread": lambda: unread(2),
    "both unread": lambda: unread(1, 2),
    "output stuck": unread_and_full,
    "output full": lambda: becomes(1, os.open("/dev/full", os.O_WRONLY)),
    "errors full": lambda: becomes(2, os.open("/dev/full", os.O_WRONLY)),
    "output in ASCII": in_ascii,
    "all closed": lambda: closed(0, 1, 2),
    "nohup": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    "no home": lambda: LASTING.enter_context(without_a_home()),
    "no temporary folder": without_a_place_for_temporary_files,
    "folder gone": in_a_folder_that_is_gone,
}

# What a server does while it starts, in turn: what is called then.
STAGES = {
    "the model is admitted": "inference_engine.compose.admit",
    "weights are loaded": "inference_engine.compose.open_backend",
    "the journal is opened": "inference_engine.session.journals.open_journal",
    "memory is taken": "inference_engine.engine.engine.open_memory",
    "ports are bound": "inference_engine.server.run.resolve_bind",
}


def signalled(number: signal.Signals, target: str) -> None:
    """The first time that this is called, after it."""
    replaced: Any = patch(target)
    call, _ = replaced.get_original()

    def then(*args: Any, **options: Any) -> Any:
        found = call(*args, **options)
        replaced.stop()
        os.kill(os.getpid(), number)
        return found

    replaced.new = then
    replaced.start()


def read_only_later() -> None:
    """From SIGUSR1 on, as of a file system that found an error in itself."""
    disk = LASTING.enter_context(FaultyDisk("read-only", refused := OSError(errno.EROFS, os.strerror(errno.EROFS))))
    apsw.set_default_vfs(disk.name)
    opened = os.open

    def only_to_read(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise refused
        return opened(path, flags, *more, **options)

    def becomes(*_: object) -> None:
        disk.fail("write", 1)
        for name in ("link", "unlink", "rename"):
            patch.object(os, name, side_effect=refused).start()
        patch.object(os, "open", only_to_read).start()

    signal.signal(signal.SIGUSR1, becomes)


if __name__ == "__main__":
    condition, _, stage = sys.argv.pop(1).partition(" when ")
    if stage:
        signalled(signal.Signals[condition], STAGES[stage])
    else:
        CONDITIONS.get(condition, read_only_later)()
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
