"""A session of `full` in a file, the simplest offload: measures how long restoring an idle session from disk takes.

    file   keys and values of every position, layer after layer, as they are in memory

A waking is timed from opening the file to the id of the next token on the host: all KV entries are read in one piece,
into pinned memory where the device is a GPU, copied to the session's regions, and the appended tokens are forwarded.
There is no queue, no journal and no other session, unlike the wakings it is compared with, so the result favours the
disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from inference_engine.backends.base import Forward
from inference_engine.decode.verifier import Block, Verifier
from inference_engine.errors import BackendError
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full

CAN_DROP = hasattr(os, "posix_fadvise")
_STEP_TOKENS = 512


def filesystem(folder: Path) -> str:
    """What kind of file system the folder is on: `ext4`, or `tmpfs`, which is memory."""
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(one.mountpoint)]
    return max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown"


class SavedEntries:
    """The KV entries of a session of `full` in a file. Not for use while an engine is working on the same model."""

    def __init__(
        self, forward: Forward, geometry: Geometry, token_ids: Sequence[int], *, room: int, path: Path
    ) -> None:
        """Prefill `token_ids` and write the entries. room: for how many later tokens, appended or generated."""
        self._limit = len(token_ids) + room
        self._context = forward.open(geometry, Full().bound(geometry, self._limit).sustained_bytes)
        self._verifier = Verifier(forward, self._context)
        self._path = path
        kv = SessionKV(Full(), self._context, self._limit)
        self._run(kv, token_ids)
        self._save(kv)

    def _save(self, kv: SessionKV) -> None:
        """Write the entries and release their memory."""
        self._length = kv.length
        # A layer with a window of its own has only that.
        self._positions = [np.sort(group.held[group.held >= 0]) for group in kv.groups]
        tensors = [
            states
            for group, positions in zip(kv.groups, self._positions, strict=True)
            for states in group.read_entries(positions)
        ]
        kv.release()
        self._shapes, self._dtype = [states.shape for states in tensors], tensors[0].dtype
        with self._path.open("wb") as file:
            for states in tensors:
                file.write(_bytes_of(states.cpu()))
            file.flush()
            os.fsync(file.fileno())
        self.file_bytes = self._path.stat().st_size
        self._buffer = torch.empty(self.file_bytes, dtype=torch.uint8, pin_memory=self._context.device.type == "cuda")
        self._host = _bytes_of(self._buffer)

    def first_token(self, appended: Sequence[int], *, drop_cache: bool) -> tuple[int, float]:
        """The id that follows the history and `appended`, and the seconds until it was known.

        drop_cache: the system is asked to forget the file's pages first, so that they come from where they are stored;
        what storage beneath keeps in caches of its own cannot be known.
        """
        self._clear()
        if drop_cache:
            self._drop_cache()
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        began = time.perf_counter()
        kv = self._woken()
        token = int(self._run(kv, appended).argmax())
        seconds = time.perf_counter() - began
        kv.release()
        return token, seconds

    def extend(self, token_ids: Sequence[int]) -> None:
        """Put `token_ids` behind the history: its entries are read, extended and written again."""
        self._clear()
        kv = self._woken()
        self._run(kv, token_ids)
        self._save(kv)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink()

    def _clear(self) -> None:
        """Zero the pool, so that no entry of an earlier session can be read."""
        self._context.pool.memory.zero_()

    def _woken(self) -> SessionKV:
        tensors = iter(self._read())
        kv = SessionKV(Full(), self._context, self._limit)
        for group, positions in zip(kv.groups, self._positions, strict=True):
            group.write_entries(positions, next(tensors), next(tensors))
        kv.length = self._length
        return kv

    def _run(self, kv: SessionKV, token_ids: Sequence[int]) -> Tensor:
        """Forward and commit `token_ids`; the logits [V] after the last."""
        ids = np.array(token_ids, dtype=np.uint32)
        while True:
            some, ids = np.split(ids, [min(_STEP_TOKENS, kv.room())])
            (outcome,) = self._verifier.run([Block(kv=kv, token_ids=some, wanted_logits=1)])
            kv.commit(kv.length + len(some))
            if not len(ids):
                assert outcome.logits is not None
                return outcome.logits[-1]

    def _read(self) -> list[Tensor]:
        with self._path.open("rb", buffering=0) as file:
            done = 0
            while done < self.file_bytes:  # one call reads 2 GiB at most
                if not (count := file.readinto(self._host[done:])):
                    raise BackendError(f"the file of KV entries ended after {done} of {self.file_bytes} bytes")
                done += count
        states = self._buffer.to(self._context.device, non_blocking=True).view(self._dtype)
        ends = np.cumsum([shape.numel() for shape in self._shapes])
        return [states[end - shape.numel() : end].view(shape) for end, shape in zip(ends, self._shapes, strict=True)]

    def _drop_cache(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _bytes_of(states: Tensor) -> memoryview:
    """What a tensor on the host is made of; a copy only if it does not lie in one piece."""
    return states.contiguous().view(torch.uint8).numpy().reshape(-1).data
