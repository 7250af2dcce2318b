"""A disk for SQLite that fails where a test wants it to, fills up, and remembers what a loss of power could leave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import apsw

SECTOR_BYTES = 512
SYSTEM = apsw.vfs_names()[0]  # the disk that there is

Event = tuple[Any, ...]  # ("write", file, offset, data) · ("cut", file, size) · ("sync", file) · ("delete", file)


class FaultyDisk:
    """Use it as a context: within, SQLite knows it by `name`."""

    def __init__(self, name: str, error: OSError | None = None) -> None:
        """error: of the system, for calls that fail."""
        self.name = name
        self.error = error
        self.is_full = False
        self.failing: tuple[str, int] | None = None  # a kind of call, and the number of the one that fails
        self._filling: int | None = None  # the number of the write that finds the disk full
        self.events: list[Event] = []
        self._base: dict[str, bytes] = {}
        self._counts = {"write": 0, "sync": 0}
        self._vfs: apsw.VFS | None = None

    def __enter__(self) -> FaultyDisk:
        self._vfs = _vfs_of(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._vfs is not None
        self._vfs.unregister()

    def fail(self, kind: str, after: int) -> None:
        """The call of this kind that comes so many from now fails, and no other does."""
        self.failing = kind, self._counts[kind] + after

    def fill(self, after: int) -> None:
        """The write that comes so many from now finds the disk full, and so do others until `is_full` is False."""
        self._filling = self._counts["write"] + after

    def record(self, folder: Path) -> None:
        """From now on, remember what is written. What is there already is on the disk."""
        self.events = []
        self._base = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("journal")}

    def note(self, kind: str, *event: Any) -> None:
        if kind in self._counts:
            self._counts[kind] += 1
            if kind == "write" and self._counts[kind] == self._filling:
                self.is_full = True
            if kind == "write" and self.is_full:
                raise apsw.FullError("scripted: no space")
            if self.failing == (kind, self._counts[kind]):
                failed: Any = apsw.IOError(f"scripted: {kind} failed")
                if self.error is not None:
                    failed.extendedresult = apsw.SQLITE_IOERR_WRITE
                raise failed
        self.events.append((kind, *event))

    def cuts(self, rng: random.Random, *, draws: int, without_syncs_of: str = "\0") -> Iterator[Cut]:
        """What a loss of power could leave, so many times.

        All that was synced is there. Of what was not, any part may be, the last write torn at a sector. Moments are
        drawn, and come in order; a cut may come again. Each can be looked at until the next one is asked for.
        """
        synced = {name: bytearray(data) for name, data in self._base.items()}
        pending: dict[str, list[Event]] = {}
        past = syncs = 0
        for moment in sorted(rng.randrange(1, len(self.events) + 1) for _ in range(draws)):
            for event in self.events[past:moment]:
                kind, name = event[:2]
                if kind == "sync" and not name.endswith(without_syncs_of):
                    for one in pending.pop(name, []):
                        _apply(synced, one)
                    syncs += 1
                elif kind == "delete":
                    synced.pop(name, None)
                    pending.pop(name, None)
                    syncs += 1
                elif kind in ("write", "cut"):
                    pending.setdefault(name, []).append(event)
            past = moment
            yield Cut(moment, syncs, synced, {name: _part(rng, events) for name, events in pending.items()})


@dataclass(frozen=True, slots=True)
class Part:
    """Which events of those that were not synced are on the disk, by their numbers. torn: bytes of the last; 0: all."""

    events: list[Event]
    chosen: tuple[int, ...]
    torn: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A loss of power. moment: events until then; syncs: how many of them made something safe."""

    moment: int
    syncs: int
    _synced: dict[str, bytearray]
    _parts: dict[str, Part]

    @property
    def left(self) -> tuple[Any, ...]:
        """Cuts that leave the same of the same events are equal here. Others may leave equal files, too."""
        return self.syncs, *((name, part.chosen, part.torn) for name, part in self._parts.items())

    def files(self) -> dict[str, bytes]:
        """The files' contents."""
        left = {name: bytearray(data) for name, data in self._synced.items()}
        for part in self._parts.values():
            for number in part.chosen:
                event = part.events[number]
                if part.torn and number == part.chosen[-1]:
                    event = (*event[:3], event[3][: part.torn])
                _apply(left, event)
        return {name: bytes(data) for name, data in left.items()}


def _part(rng: random.Random, events: list[Event]) -> Part:
    """Some of what was not synced: nothing, a beginning, any of it, perhaps with the last write torn."""
    how = rng.randrange(4)
    if how == 2:
        return Part(events, tuple(number for number in range(len(events)) if rng.random() < 0.5))
    count = 0 if how == 0 else rng.randrange(len(events) + 1)
    chosen = tuple(range(count))
    if how == 3 and count and events[count - 1][0] == "write" and len(events[count - 1][3]) > SECTOR_BYTES:
        sectors = len(events[count - 1][3]) // SECTOR_BYTES
        return Part(events, chosen, SECTOR_BYTES * rng.randrange(1, sectors + 1))
    return Part(events, chosen)


def _apply(files: dict[str, bytearray], event: Event) -> None:
    data = files.setdefault(event[1], bytearray())
    if event[0] == "cut":
        del data[event[2] :]
        return
    _, _, offset, written = event
    data.extend(b"\0" * (offset + len(written) - len(data)))
    data[offset : offset + len(written)] = written


@cache
def unsynced() -> str:
    """The name of a disk that syncs nothing, for looks at what is left: a sync changes nothing of it, and takes most of
    the time."""

    class File(apsw.VFSFile):
        def __init__(self, name: Any, flags: list[int]) -> None:
            super().__init__("", name, flags)

        def xSync(self, flags: int) -> None:
            pass

    class Disk(apsw.VFS):
        def __init__(self) -> None:
            super().__init__("unsynced", "")

        def xOpen(self, name: Any, flags: list[int]) -> Any:
            return File(name, flags)

        def xDelete(self, name: str, sync: bool) -> None:
            super().xDelete(name, False)

    _kept.append(Disk())
    return "unsynced"


_kept: list[apsw.VFS] = []  # as long as the process


def _vfs_of(disk: FaultyDisk) -> apsw.VFS:
    class File(apsw.VFSFile):
        def __init__(self, name: Any, flags: list[int]) -> None:
            super().__init__(SYSTEM, name, flags)
            path = name.filename() if isinstance(name, apsw.URIFilename) else name
            self.name = Path(path).name if path else ""

        def xWrite(self, data: bytes, offset: int) -> None:
            disk.note("write", self.name, offset, bytes(data))
            super().xWrite(data, offset)

        def xTruncate(self, size: int) -> None:
            disk.note("cut", self.name, size)
            super().xTruncate(size)

        def xSync(self, flags: int) -> None:
            disk.note("sync", self.name)
            super().xSync(flags)

    class Disk(apsw.VFS):
        def __init__(self) -> None:
            super().__init__(disk.name, SYSTEM)

        def xGetLastError(self) -> tuple[int, str]:
            number, said = super().xGetLastError()
            return (number if disk.error is None else disk.error.errno or 0), said or ""

        def xOpen(self, name: Any, flags: list[int]) -> Any:
            return File(name, flags)

        def xDelete(self, name: str, sync: bool) -> None:
            disk.note("delete", Path(name).name)
            super().xDelete(name, sync)

    return Disk()
