"""The first rank's view of the others: processes of their own, which do what it tells them, in its order.

    start ──▶ each rank loads its part of the weights ──▶ open: the pool, recordings ──▶ steps, writes between them
    a rank ends, or does not follow ──▶ `failure` says so ──▶ the server ends, for the weights of that rank are gone

A step is whole numbers, and ranks have as many KV heads each, so the numbers of the first are those of all. What is
written to the pool between steps (slots wiped or copied, sink keys moved) is sent as places in the pool.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from inference_engine.backends.base import Admitted
from inference_engine.backends.ranks.causal_plan import StepShape
from inference_engine.backends.ranks.group import (
    WAIT_SECONDS,
    Alone,
    RankGroup,
    bytes_of,
    join_group,
    leave_group,
    like_views,
)
from inference_engine.backends.ranks.link import Link, Numbers, ring_file
from inference_engine.config import ModelConfig, child_environment
from inference_engine.errors import BackendError, EngineStalled

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 1800.0  # for its part of the weights
_CLOSE_SECONDS = 5.0
View = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]  # of the pool's memory: offset, sizes, strides
C = TypeVar("C")


class Followers:
    """The ranks beside the first one; none, where a model is in one process. Implements Mirror."""

    group: RankGroup = Alone()

    def open(self, *, page_tokens: int, segment_tokens: int, capacity_bytes: int, address_bytes: int) -> None:
        """Have them allocate a pool of their own, and record their steps beside this rank, which does so next."""

    def replay(self, kind: tuple[Any, ...], numbers: Sequence[Numbers], *, collects: bool) -> None:
        """Have them run the step that was recorded as `kind`: positions, tokens whose logits are computed, tables.

        collects: and send their logits.
        """

    def compute(self, shape: StepShape, numbers: Sequence[Numbers]) -> None:
        """The same of a step that is not recorded."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around a step of all ranks."""
        yield

    def wiped(self, view: Tensor) -> None: ...

    def copied(self, to: Tensor, of: Tensor) -> None: ...

    def cleaned(self, first: int, count: int) -> None: ...

    def turned(self, to: Tensor, of: Tensor, shift: int, rotary: str) -> None: ...

    @property
    def ranks(self) -> int:
        return self.group.ranks

    def collected(self, views: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(views)]

    def given(self, views: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None: ...

    def done(self, work: Callable[[C], Tensor | None], context: C) -> list[Tensor]:
        return done_with(self.group, work, context)

    def failure(self) -> str:
        """Why no more steps can run; "": they can."""
        return ""

    def close(self) -> None:
        """End them. No step can run after that."""


class Leader(Followers):
    """Ranks 1 to N - 1 of a model, one process each, on the devices behind the first one's."""

    _failed = ""

    def __init__(self, config: ModelConfig, admitted: Admitted) -> None:
        """Start them. Raises BackendError if they cannot be."""
        self._count = config.tensor_parallel
        self._folder = tempfile.TemporaryDirectory(prefix="kakeya-ranks-")
        self._place = Path(self._folder.name) / "group"
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._links, self._processes, self._folder)
        for rank in range(1, self._count):
            memory = ring_file()
            ours, theirs = Pipe()
            link = Link(ours, memory, WAIT_SECONDS)
            given = map(str, (theirs.fileno(), memory, os.getpid()))
            command = [sys.executable, "-m", "inference_engine.backends.ranks.worker", *given]
            own = (theirs.fileno(), memory)
            try:
                process = subprocess.Popen(command, pass_fds=own, env=child_environment(), stdin=subprocess.DEVNULL)
            except OSError as error:
                self.close()
                raise BackendError(f"rank {rank} of {self._count} cannot be started ({error})") from error
            finally:
                os.close(memory)
                theirs.close()
            self._processes.append(process)
            self._links.append(link)
            link.pipe.send((rank, config, admitted, str(self._place)))

    def join(self, device: torch.device, dtype: torch.dtype) -> None:
        """Once this rank has its weights: wait until all have. Raises BackendError."""
        for rank, link in enumerate(self._links, 1):
            try:
                answer = link.pipe.recv() if link.pipe.poll(_LOAD_SECONDS) else "it does not answer"
            except EOFError:
                answer = "its process ended; the log says why"
            if answer is not None:
                self.close()
                raise BackendError(f"rank {rank} of {self._count} does not start: {answer}")
        self.group = join_group(self._place, 0, self._count, device, dtype)
        logger.info("%d ranks have a part of the model each, and add up by %s", self._count, self.group.name)

    def _send(self, name: str, *arguments: object, numbers: Sequence[Numbers] = ()) -> None:
        for link in self._links:
            link.send(name, *arguments, numbers=numbers)

    def open(self, *, page_tokens: int, segment_tokens: int, capacity_bytes: int, address_bytes: int) -> None:
        self._send("open", page_tokens, segment_tokens, capacity_bytes, address_bytes)

    def replay(self, kind: tuple[Any, ...], numbers: Sequence[Numbers], *, collects: bool) -> None:
        self._send("replay", kind, collects, numbers=numbers)

    def compute(self, shape: StepShape, numbers: Sequence[Numbers]) -> None:
        self._send("compute", shape, numbers=numbers)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that fails here is not whole on the others: it is the last. Raises EngineStalled then, and after."""
        if self.failure():
            raise EngineStalled
        try:
            yield
        except Exception as error:
            logger.exception("a step failed on the first rank")
            self._failed = f"a step failed on the first rank, and the others are within it ({error})"
            raise EngineStalled from error

    def wiped(self, view: Tensor) -> None:
        self._send("wiped", _place(view))

    def copied(self, to: Tensor, of: Tensor) -> None:
        self._send("copied", _place(to), _place(of))

    def cleaned(self, first: int, count: int) -> None:
        self._send("cleaned", first, count)

    def turned(self, to: Tensor, of: Tensor, shift: int, rotary: str) -> None:
        self._send("turned", _place(to), _place(of), shift, rotary)

    def collected(self, views: Sequence[Tensor]) -> list[list[Tensor]]:
        if not views:
            return [[] for _ in range(self.ranks)]
        with self.together():
            self._send("collected", tuple(map(_place, views)))
            return [like_views(data, views) for data in self.group.collect(bytes_of(views))]

    def given(self, views: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
        if not views:
            return
        with self.together():
            self._send("given", tuple(map(_place, views)))
            self.group.spread(torch.cat([bytes_of(of_rank) for of_rank in parts]))

    def done(self, work: Callable[[C], Tensor | None], context: C) -> list[Tensor]:
        with self.together():
            self._send("done", work)
            return super().done(work, context)

    def failure(self) -> str:
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                return f"rank {rank} of {self._count} ended with status {status}, and its part of the model with it"
        return self._failed

    def close(self) -> None:
        for link in self._links:
            link.pipe.close()  # which they end at
        if self.group.ranks > 1 and not self.failure():
            leave_group()
        self._end()


def done_with(group: RankGroup, work: Callable[[C], Tensor | None], context: C) -> list[Tensor]:
    """Do it, and collect what each rank found."""
    found = work(context)
    if found is None:
        return []
    return [part.view(found.dtype).view(found.shape) for part in group.collect(bytes_of([found]))]


def _place(view: Tensor) -> View:
    return view.dtype, int(view.storage_offset()), tuple(view.shape), tuple(view.stride())


def _end(
    links: Sequence[Link], processes: Sequence[subprocess.Popen[bytes]], folder: tempfile.TemporaryDirectory[str]
) -> None:
    for link in links:
        link.pipe.close()  # which they end at
    for process in processes:
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.cleanup()


ALONE = Followers()
