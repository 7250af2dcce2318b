"""Memory-mapped weights: lets go of pages that were read, detects whether files were written since they were loaded.

A page that is read again has the current content of the file. So writing a file in place changes the running model, and
truncating it ends the process (SIGBUS). Replacing the file by another of the same name does neither: the mapping keeps
the first one.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAPS = Path("/proc/self/maps")

_log = logging.getLogger(__name__)


def let_go(data: NDArray[np.uint8]) -> None:
    """The pages of this view of a mapped file (`np.memmap`, read only) need not stay in memory.

    A page that is looked at again is read again. Does nothing for other arrays, and where the system cannot.
    """
    import numpy as np  # here: reading the command line comes by this file, and must not take its time

    base: object = data
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    advice = getattr(mmap, "MADV_DONTNEED", None)
    # Memory of our own, or a private copy that was written to, would lose its numbers.
    if not isinstance(base, np.memmap) or base.mode != "r" or advice is None:
        return
    mapped = base.base
    assert isinstance(mapped, mmap.mmap), "a np.memmap is a view of its mapping"
    first = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        mapped.madvise(advice, begin, end - begin)


class MappedWeights:
    """Files of weights, kept open. Create it before the model is loaded, and check it now and then."""

    def __init__(self, *files: Path) -> None:
        """Raises OSError for a file that cannot be read."""
        self._files: dict[str, int] = {}
        self._states: dict[str, tuple[int, int]] = {}
        try:
            for file in files:
                self._files[file.name] = os.open(file, os.O_RDONLY)
                self._states[file.name] = _state(self._files[file.name])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def spoiled(self) -> str | None:
        """A description of a change to a file that this process has mapped; None if there was none.

        A file that was copied into memory may change: that is logged once for each change.
        """
        for name, file in self._files.items():
            before, now = self._states[name], _state(file)
            if now == before:
                continue
            self._states[name] = now
            sizes = f" ({before[0]} bytes before, {now[0]} now)" if now[0] != before[0] else ""
            what = f"{name} was written to{sizes}"
            if _is_mapped(file):
                return what
            _log.warning("%s while its model is served from a copy in memory; the next start reads it anew", what)
        return None


def _state(file: int) -> tuple[int, int]:
    facts = os.fstat(file)
    return facts.st_size, facts.st_mtime_ns


def _is_mapped(file: int) -> bool:
    """Is the file mapped by this process? True where the system has no list of mappings."""
    try:
        name = str(Path(f"/proc/self/fd/{file}").readlink())
        with _MAPS.open(encoding="utf-8", errors="surrogateescape") as maps:
            # The name is the sixth column, and the system writes a newline in it as \012.
            return any(line.rstrip("\n").endswith(f" {name}") for line in maps)
    except OSError:
        return True
