"""One timed run: equal sessions are prefilled one by one, then decode together.

Every session is prefilled first, by a Generate of one token; decoding is timed in a second Generate, of all sessions of
the batch at once, from the moment each of them has its first token until the first of them has its last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inference_engine.backends.pinned import Landed
from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import BackendError
from inference_engine.kv.strategy import KVStrategy
from inference_engine.kv.views import CausalView, ChunkView, DenseView
from inference_engine.types import Bound, Event, Failed, Finished, GenerateParams, Sampling, TokenCommitted
from laboratory.evaluation.sessions import append_all, turned

GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One session, or `batch` equal ones at once.

    first_token_seconds: of a session's first Generate, prefill included, the others being idle. resume_seconds: to the
    first token of a later Generate, the slowest of the batch. token_seconds: of one step that gives every session its
    next token. kv_bytes: of one session, between Generates; tier_bytes: beside those, off the device. kv_peak_bytes: of
    one session, the most that was seen at any token. transient_bytes: the most the device's allocator held beyond what
    it held before, in the decoding Generate (None: this device has no such count); buffers are allocated before and are
    no part of it.
    """

    prefill_seconds: float
    first_token_seconds: float
    resume_seconds: float
    token_seconds: float
    kv_bytes: int
    tier_bytes: int
    kv_peak_bytes: int
    transient_bytes: int | None
    bound: Bound
    attended_positions: int
    evicted_positions: int


def run(engine: Engine, strategy: KVStrategy, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """Prefill a session for each prompt, then let all of them decode `tokens` tokens at once.

    Raises InvalidArgument or NoCapacity if the engine cannot hold such sessions, with none left open.
    """
    if tokens < 2:
        raise ValueError(f"speed is measured between tokens: at least 2 are needed, got {tokens}")
    sessions: list[str] = []
    try:
        for prompt in prompts:
            limit = len(prompt) + 1 + tokens
            sessions.append(engine.create_session(strategy=strategy, limit_tokens=limit, guaranteed=True).session_id)
        return _run(engine, sessions, prompts, tokens)
    finally:
        for session in sessions:
            engine.close_session(session)


def _run(engine: Engine, sessions: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    prefill_seconds, first_token_seconds = [], []
    peak = 0
    for session, prompt in zip(sessions, prompts, strict=True):
        append_all(engine, session, prompt)
        began = time.perf_counter()
        (watch,) = start(engine, [session], tokens=1)
        prefill_seconds.append(watch.wait().prefill_seconds)
        first_token_seconds.append(watch.token_times[0] - began)
        peak = max(peak, watch.kv_peak_bytes)

    allocator = Allocator(engine)
    began = time.perf_counter()
    watches = start(engine, sessions, tokens=tokens)
    endings = [watch.wait() for watch in watches]
    infos = [engine.session_info(session) for session in sessions]
    return Run(
        prefill_seconds=sum(prefill_seconds) / len(sessions),
        first_token_seconds=sum(first_token_seconds) / len(sessions),
        resume_seconds=max(watch.token_times[0] for watch in watches) - began,
        token_seconds=step_seconds([watch.token_times for watch in watches]),
        kv_bytes=max(info.kv_live_bytes for info in infos),
        tier_bytes=max(info.tier_live_bytes for info in infos),
        kv_peak_bytes=max(peak, *(watch.kv_peak_bytes for watch in watches)),
        transient_bytes=allocator.grown_bytes(),
        bound=infos[0].bound,
        attended_positions=endings[0].attended_positions,
        evicted_positions=endings[0].evicted_positions,
    )


def start(
    engine: Engine, sessions: Sequence[str], *, tokens: int, reads_bytes: bool = True, sampling: Sampling = GREEDY
) -> list[Watch]:
    """Start a Generate on each session. reads_bytes: at every event, which costs the engine's thread a little."""
    all_asked = threading.Event()
    try:
        watches = [Watch(engine, session, all_asked, reads_bytes=reads_bytes) for session in sessions]
        for session, watch in zip(sessions, watches, strict=True):
            params = GenerateParams(max_tokens=tokens, sampling=sampling)
            watch.generation = engine.generate(session, params, listener=watch)
    finally:
        all_asked.set()
    return watches


def prefill_rate(engine: Engine, session: str, prompt: Sequence[int]) -> float:
    """Append a prompt and compute it, with one token generated; tokens a second."""
    append_all(engine, session, prompt)
    (watch,) = start(engine, [session], tokens=1)
    ending = watch.wait()
    return ending.prefilled_tokens / ending.prefill_seconds


def prefill_rates(
    engines: dict[str, Engine], sessions: Mapping[str, Sequence[str]], prompts: Sequence[Sequence[int]]
) -> dict[str, list[float]]:
    """Of each engine's sessions, one for each prompt; the engines take turns."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number, prompt in enumerate(prompts):
        for name in turned(list(engines), number):
            found[name].append(prefill_rate(engines[name], sessions[name][number], prompt))
    return found


def turn_milliseconds(engine: Engine, sessions: Sequence[str], token_ids: Sequence[int]) -> float:
    """From the append of some tokens to the first one of the answer, in the last of the sessions."""
    began = time.perf_counter()
    for session in sessions:
        append_all(engine, session, token_ids)
    watches = start(engine, sessions, tokens=1, reads_bytes=False)
    for watch in watches:
        watch.wait()
    return 1e3 * (max(watch.token_times[0] for watch in watches) - began)


@contextmanager
def unattended() -> Iterator[None]:
    """Prefills within write entries, and attend to none: for histories whose attention would take too long.

    What would be restored to be attended to is not restored. Chunks so short that their queries read by plan numbers
    attend as ever, for steps are recorded once and for all.
    """

    def zeros(_view: Any, _layer: int, queries: Tensor, *_others: Any) -> Tensor:
        return torch.zeros_like(queries)

    with ExitStack() as stack:
        for kind in (DenseView, CausalView, ChunkView):
            stack.enter_context(patch.object(kind, "read", zeros))
        yield


def decode_milliseconds(engine: Engine, sessions: Sequence[str], tokens: int, sampling: Sampling = GREEDY) -> float:
    """Of one step that gives every session its next token, while all of them generate that many."""
    watches = start(engine, sessions, tokens=tokens, reads_bytes=False, sampling=sampling)
    for watch in watches:
        watch.wait()
    return 1e3 * step_seconds([watch.token_times for watch in watches])


@contextmanager
def host_seconds() -> Iterator[list[float]]:
    """Within it: of each step that a GPU computes while the host goes on, how long the host takes from where the ids of
    the step before have come to where it waits for this one's. Between two Generates it is much longer.
    """
    found: list[float] = []
    since: float | None = None
    wait = Landed.wait

    def watched(landed: Landed) -> None:
        nonlocal since
        if since is not None:
            found.append(time.perf_counter() - since)
        wait(landed)
        since = time.perf_counter()

    with patch.object(Landed, "wait", watched):
        yield found


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Samples of every side, one a round. No side always comes first; a first round warms up and is not kept."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in turned(list(sides), number):
            sample = sides[name]()
            if number:
                samples[name].append(sample)
    return samples


def step_seconds(times: Sequence[Sequence[float]]) -> float:
    """Seconds that each session waits for a token while all of them decode."""
    began, ended = max(stamps[0] for stamps in times), min(stamps[-1] for stamps in times)
    steps = [sum(began < stamp <= ended for stamp in stamps) for stamps in times]
    if not min(steps):
        raise BackendError(f"{len(times)} sessions never decoded together: more tokens than {len(times[0])} are needed")
    return (ended - began) * len(times) / sum(steps)


class Allocator:
    """How far the device's allocator went beyond where it stood when this was made."""

    def __init__(self, engine: Engine) -> None:
        device = engine.info().facts.device
        self._device = torch.device(device) if device.startswith("cuda") else None
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def grown_bytes(self) -> int | None:
        if self._device is None:
            return None
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before


class Watch:
    """A Generate's listener: its tokens, when they came, and the most K/V bytes its session held at any event.

    At its first token it holds the engine up until `all_asked` is set: a batch decodes together from the beginning.
    """

    def __init__(
        self, engine: Engine, session_id: str, all_asked: threading.Event, *, reads_bytes: bool = True
    ) -> None:
        self._engine = engine
        self._reads_bytes = reads_bytes
        self._session_id = session_id
        self._all_asked = all_asked
        self._ended = threading.Event()
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self.kv_peak_bytes = 0
        self.ending: Finished | Failed | None = None
        self.generation: Generation | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenCommitted):
            self.token_times.append(time.perf_counter())
            self.token_ids.append(event.token_id)
            self._all_asked.wait()
        if isinstance(event, Finished | Failed):
            self.ending = event
            self._ended.set()
        elif self._reads_bytes:
            live = self._engine.session_info(self._session_id).kv_live_bytes
            self.kv_peak_bytes = max(self.kv_peak_bytes, live)

    def wait(self) -> Finished:
        """Until the Generate has ended; raises what it failed with."""
        self._ended.wait()
        if isinstance(self.ending, Failed):
            raise self.ending.error
        assert self.ending is not None
        return self.ending
