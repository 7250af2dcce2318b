"""The folder of a journal: of one user and one process, with a reserve for a disk that is full."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import stat
import sys
from contextlib import suppress
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from pathlib import Path

import psutil

from inference_engine.errors import ConfigError
from inference_engine.types import Durability

logger = logging.getLogger(__name__)

LOCK, RESERVE = "lock", "reserve"
# Of a disk, of what a user may have of it, of what a process may have in one file (`ulimit -f`).
NO_SPACE = (ENOSPC, EDQUOT, EFBIG)
_LOCK_BYTES = 32
_BLOCK_BYTES = 512  # that stat counts
_RESERVED_PART, _LEAST_RESERVED_BYTES = 1 / 16, 2**18  # of what is free at the start


class FolderLock:
    """A folder that this process alone uses: the folder itself is locked, so that nothing is written into it for that.

    The file LOCK has the process id and the durability of the server that used it last. was: that durability; "": no
    server used it.
    """

    def __init__(self, folder: Path, descriptor: int, was: str) -> None:
        self._folder = folder
        self._descriptor = descriptor
        self._files: dict[Path, tuple[int, int]] = {}
        self.was = was

    def note(self, durability: Durability) -> None:
        """Record this process and its durability. Only after the checks, which depend on what stood there."""
        # In place and of one length, which a full disk has room for.
        text = f"{os.getpid()} {durability.value}".ljust(_LOCK_BYTES - 1) + "\n"
        try:
            descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, text.encode(), 0)
                os.ftruncate(descriptor, _LOCK_BYTES)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"state_dir {self._folder}: {LOCK} cannot be written: {error.strerror}") from error

    def follow(self, *names: str) -> None:
        """These are open from now on."""
        self._files = {path: _identity(path) for path in (self._folder / name for name in names)}

    def check(self) -> None:
        """Raises FolderGone if a file that is followed is no longer there, or another one is."""
        for path, known in self._files.items():
            try:
                is_there = _identity(path) == known
            except (FileNotFoundError, NotADirectoryError):
                is_there = False
            if not is_there:
                raise FolderGone(
                    f"{path} is not the file that this server opened: state_dir {self._folder} was moved, replaced or "
                    "removed while it was in use. Nothing of the last changes was sent. What clients received is in "
                    "the folder that was there: put it back, and start again"
                )

    def release(self) -> None:
        os.close(self._descriptor)


class FolderGone(OSError):
    """What is written is not in the folder that the next server would open."""


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


class Reserve:
    """A file of zeros, whose space is given up where the disk is full: what is under way can be written, and sessions
    can be closed. It is as large as the log becomes, or a part of what is free where that is little."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._path = folder / RESERVE
        system = os.statvfs(folder)
        free = system.f_bavail * system.f_frsize + (self._path.stat().st_size if self._path.exists() else 0)
        self.nbytes = min(most_bytes, max(_LEAST_RESERVED_BYTES, int(free * _RESERVED_PART)))
        if (largest := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
            self.nbytes = min(self.nbytes, largest)

    def take(self) -> bool:
        """False if the disk has no room for it; then it is not there."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, self.nbytes)
                if os.fstat(descriptor).st_blocks * _BLOCK_BYTES < self.nbytes:
                    _allocate(descriptor, self.nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in NO_SPACE:
                logger.warning("%s cannot be kept, so nothing is reserved for a full disk: %s", self._path, error)
                return True
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _allocate(descriptor: int, nbytes: int) -> None:
    """Have space for a file, not only a length. Raises OSError."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    written = 0
    while written < nbytes:
        written += os.pwrite(descriptor, bytes(nbytes - written), written)
    os.fsync(descriptor)  # some file systems find no room for it only now


def check_private(folder: Path) -> None:
    """Make the folder, or raise ConfigError if others may read or change it, or it cannot be changed at all."""
    read_only = f"state_dir {folder} is on a file system mounted read-only: mount it for writing, or name another one"
    try:
        if not folder.parent.is_dir():
            raise ConfigError(f"state_dir {folder} cannot be made: there is no folder {folder.parent}; make that first")
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
        found, system = folder.stat(), os.statvfs(folder)
    except OSError as error:
        raise ConfigError(read_only if error.errno == EROFS else f"state_dir {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"state_dir {folder} is not a folder")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"state_dir {folder} belongs to user {found.st_uid}, and this process runs as {os.geteuid()}: run the "
            "server as its owner, or name another folder"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"state_dir {folder} has the mode {stat.S_IMODE(found.st_mode):o}, so that others can reach the histories "
            f"in it: chmod 700 {folder}"
        )
    if system.f_flag & os.ST_RDONLY:
        raise ConfigError(read_only)


def take_folder(folder: Path) -> FolderLock:
    """Raises ConfigError, naming the process, if another one uses the folder. Writes nothing."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"state_dir {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except OSError:
        os.close(descriptor)
        is_ours = False
    try:
        known = (folder / LOCK).read_text(errors="replace").split()
    except OSError:  # no server used it yet
        known = []
    if not is_ours:
        # Until a server has looked through the folder, the file names the one before it.
        is_named = bool(known) and known[0].isdigit() and psutil.pid_exists(int(known[0]))
        process = f"process {known[0]}" if is_named else "another process"
        raise ConfigError(f"state_dir {folder} is in use by {process}: stop that server, or name another folder")
    return FolderLock(folder, descriptor, known[1] if len(known) > 1 else "")
