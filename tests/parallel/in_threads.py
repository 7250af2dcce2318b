"""Two ranks of a model in one process: the second one runs in a thread, and does what the first one tells it to."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.ranks.leader import Followers, Leader
from inference_engine.backends.ranks.link import Numbers
from inference_engine.backends.ranks.loading import load_rank, serve_rank
from inference_engine.backends.ranks.worker import Rank
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.compose import admit
from inference_engine.config import ModelConfig
from tests.tiny import tiny_model

RANKS = 2
_KEPT = ExitStack()
_SECONDS = 30


class _Meeting:
    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=_SECONDS)
        self.given: list[Tensor] = [torch.empty(0)] * RANKS


class ThreadGroup:
    """Implements RankGroup."""

    ranks, name = RANKS, "threads"

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.meeting = rank, meeting

    def _all(self, states: Tensor) -> list[Tensor]:
        meeting = self.meeting
        meeting.given[self.rank] = states
        meeting.barrier.wait()
        found = [each.clone() for each in meeting.given]
        meeting.barrier.wait()
        return found

    def sum(self, states: Tensor) -> Tensor:
        first, second = self._all(states)
        return first + second

    def gather(self, numbers: Tensor) -> Tensor:
        return torch.cat(self._all(numbers), dim=-1)

    def collect(self, data: Tensor) -> Sequence[Tensor]:
        return self._all(data)

    def spread(self, data: Tensor) -> Tensor:
        return self._all(data)[0]


class InThread(Leader):
    """Tells a rank in a thread. sent: the names of all messages."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group
        self.queue: SimpleQueue[tuple[str, tuple[Any, ...], Numbers] | None] = SimpleQueue()
        self.sent: list[str] = []
        self.error: Exception | None = None

    def _send(self, name: str, *arguments: object, numbers: Sequence[Numbers] = ()) -> None:
        self.sent.append(name)
        flat = [part.reshape(-1) for part in numbers]
        sent = pickle.loads(pickle.dumps(arguments))  # as through a pipe
        self.queue.put((name, sent, np.concatenate(flat) if flat else np.zeros(0, np.int64)))

    def failure(self) -> str:
        return self._failed if self.error is None else str(self.error)

    def follow(self, open_rank: Callable[[], Rank]) -> None:
        try:
            rank = open_rank()
            while (message := self.queue.get()) is not None:
                with torch.inference_mode():
                    rank.follow(*message)
        except Exception as error:  # noqa: BLE001 - the first rank waits for it, and fails by that
            self.error = error


@contextmanager
def two_ranks(folder: Path, cache: Path, **settings: Any) -> Iterator[TorchForward]:
    """The first rank of a model in a folder; `followers` is an InThread."""
    config = ModelConfig(
        model=str(folder),
        cache_dir=str(cache),
        device="cpu",
        backend="torch",
        threads=1,
        tensor_parallel=RANKS,
        **settings,
    )
    admitted, meeting = admit(config), _Meeting()
    followers, second = InThread(ThreadGroup(0, meeting)), Followers()
    second.group = ThreadGroup(1, meeting)

    # One after the other: transformers changes what all threads see while it makes a model.
    models = [load_rank(config, rank) for rank in range(RANKS)]

    def follow() -> None:
        followers.follow(lambda: Rank(serve_rank(models[1], config, admitted, second)))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield serve_rank(models[0], config, admitted, followers)
    finally:
        followers.queue.put(None)
        thread.join(_SECONDS)
        if followers.error is not None:
            raise followers.error


@lru_cache(maxsize=2)
def tiny_ranks(*, seed: int = 0, windowed: bool = True) -> TorchForward:
    """TinyModel's first rank, as long as the tests run: the other is in a daemon thread."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(seed=seed, windowed=windowed).save_pretrained(folder)
        return _KEPT.enter_context(two_ranks(Path(folder), Path(folder)))
