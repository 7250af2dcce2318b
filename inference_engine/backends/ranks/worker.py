"""A rank beside the first one: loads its part of the model, and runs what the first rank sends, until that ends.

python -m inference_engine.backends.ranks.worker PIPE MEMORY      descriptors, of `leader.py`, which starts it
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from inference_engine.backends.base import Admitted, use_threads
from inference_engine.backends.graphs import RecordedKind
from inference_engine.backends.ranks.causal_plan import StepShape
from inference_engine.backends.ranks.group import WAIT_SECONDS, bytes_of, join_group, leave_group, like_views
from inference_engine.backends.ranks.leader import Followers, View, done_with
from inference_engine.backends.ranks.link import Link, Message, Numbers
from inference_engine.backends.ranks.loading import load_rank, serve_rank
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import ModelConfig
from inference_engine.errors import KakeyaError
from inference_engine.kv.context import KVContext

logger = logging.getLogger(__name__)

EXIT_FAILED = 70  # EX_SOFTWARE
_PR_SET_PDEATHSIG = 1


def main(pipe: int, memory: int, parent: int) -> int:
    # Whatever ends the first rank, this one follows; a terminal and a supervisor tell both at once.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with(parent)
    link = Link(Connection(pipe), memory, WAIT_SECONDS)
    number, config, admitted, place = link.pipe.recv()
    logging.basicConfig(format=f"rank {number}: %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    faulthandler.enable()
    try:
        rank = Rank(_open(link, number, config, admitted, Path(place)))
        while True:
            name, arguments, numbers = link.receive()
            with torch.inference_mode():
                rank.follow(name, arguments, numbers)
    except (EOFError, ConnectionResetError):
        leave_group()  # the first rank closes, and does the same
        return 0


def _open(link: Link, rank: int, config: ModelConfig, admitted: Admitted, place: Path) -> TorchForward:
    use_threads(config.threads)
    try:
        loaded = load_rank(config, rank)
    except KakeyaError as error:
        link.pipe.send(str(error))
        raise
    link.pipe.send(None)
    dtype = next(loaded.model.parameters()).dtype
    followers = Followers()  # none follows this one
    followers.group = join_group(place, rank, config.tensor_parallel, torch.device(loaded.device), dtype)
    return serve_rank(loaded, config, admitted, followers)


class Rank:
    """Does what the first rank does, by the messages of `Followers`."""

    def __init__(self, forward: TorchForward) -> None:
        self._forward = forward
        self._context: KVContext | None = None

    def follow(self, name: str, arguments: Message, numbers: Numbers) -> None:
        getattr(self, f"_{name}")(*arguments, *([numbers] if len(numbers) else []))

    def _open(self, page_tokens: int, segment_tokens: int, capacity_bytes: int, address_bytes: int) -> None:
        self._context = None  # its memory first
        geometry = self._forward.geometry(page_tokens=page_tokens, segment_tokens=segment_tokens)
        self._context = self._forward.open(geometry, capacity_bytes, address_bytes=address_bytes)

    @property
    def _opened(self) -> KVContext:
        assert self._context is not None, "a pool is opened before steps run"
        return self._context

    def _replay(self, kind: RecordedKind, collects: bool, numbers: Numbers) -> None:
        self._forward.replay(self._opened, kind, numbers, collects=collects)

    def _compute(self, shape: StepShape, numbers: Numbers) -> None:
        self._forward.compute(self._opened, shape, numbers)

    def _view(self, view: View) -> Tensor:
        dtype, offset, sizes, strides = view
        return self._opened.pool.memory.view(dtype).as_strided(sizes, strides, offset)

    def _wiped(self, view: View) -> None:
        self._opened.pool.wipe(self._view(view))

    def _copied(self, to: View, of: View) -> None:
        self._opened.pool.copy(self._view(to), self._view(of))

    def _cleaned(self, first: int, count: int) -> None:
        self._opened.pool.zero(first, count)

    def _turned(self, to: View, of: View, shift: int, rotary: str) -> None:
        own = self._view(of)
        keys = own.flatten(0, 1)
        moved = self._opened.rotate(keys, torch.full((keys.shape[1],), shift, dtype=torch.long), rotary)
        self._view(to).copy_(moved.view(own.shape))

    def _collected(self, views: Sequence[View]) -> None:
        self._forward.followers.group.collect(bytes_of([self._view(view) for view in views]))

    def _done(self, work: Callable[[KVContext], Tensor | None]) -> None:
        done_with(self._forward.followers.group, work, self._opened)

    def _given(self, places: Sequence[View]) -> None:
        group, views = self._forward.followers.group, [self._view(view) for view in places]
        own = bytes_of(views)
        data = group.spread(own.new_empty(group.ranks * len(own)))
        for view, part in zip(views, like_views(data.chunk(group.ranks)[group.rank], views), strict=True):
            view.copy_(part)


def _end_with(parent: int) -> None:
    """Have the system end this process when the first rank ends, even if it hangs: it would keep its GPU's memory."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(EXIT_FAILED)


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(code)  # a group of processes that has lost one waits for it when it is taken apart
