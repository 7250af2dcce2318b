"""A budget of Python calls for one token of one session: what is added to every step has to be seen, and decided.

Calls are counted, not time: the same count on every machine.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from statistics import median
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

from inference_engine.backends.base import Forward, Launched, Step
from inference_engine.config import EngineConfig
from inference_engine.decode.draft import Drafter
from inference_engine.decode.verifier import Block, Verifier
from inference_engine.engine import Engine
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kernels.sampler import Sampler
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.types import Event, GenerateParams, Sampling, TokenCommitted
from kv_cache_proposer.ngram import NgramDrafter
from tests.facade import WatchedForward, standing_still
from tests.laws.variants import drain, text
from tests.tiny import PAGES, SMALL, tiny_forward, tiny_forward_on
from tests.tiny_native import tiny_native

# What a token takes today. Lower them as the counts fall; a change that raises one says what for.
# Python 3.11 counts a comprehension as a call, later ones do not.
VERIFIER_CALLS = {"torch": 730, "native": 75}  # the plan works out how a read grows
LOOP_CALLS = {"torch": 841, "native": 181}
# Of one session more in a step that is launched ahead, apart from the device's operations and their references.
SESSION_AHEAD_CALLS = 48  # its first step asks whether old entries have to be checked
DRAFTING_CALLS = (
    320  # of a token beside a drafter that finds a copy at almost every step; a constraint's drafts count, too
)
# From one token of a native Generate to its next, in the runtime's own files: calls, and those that enter another room.
OWN_CALLS, ROOM_CHANGES = 90, 25

SEGMENT: int = SMALL["segment_tokens"]
LENGTH = 3 * SEGMENT  # pages and segments begin and end in the same steps each time
WARM_UP = 2 * SEGMENT


class Calls:
    """How often Python code was called on the threads that count, in files whose path contains one of `rooms`."""

    def __init__(self, rooms: Sequence[str] = ("",)) -> None:
        self.count = 0
        self._rooms = rooms

    def _saw(self, frame: FrameType, event: str, _: Any) -> None:
        self.count += event == "call" and any(room in frame.f_code.co_filename for room in self._rooms)

    def begin(self) -> None:
        sys.setprofile(self._saw)

    def end(self) -> None:
        sys.setprofile(None)


class Path:
    """The rooms of the runtime that a thread goes through: its calls, and how many enter another room than the last."""

    def __init__(self) -> None:
        self.calls = self.changes = 0
        self._room = ""

    def saw(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (found := _ROOM.search(frame.f_code.co_filename)):
            self.calls += 1
            self.changes += found[1] != self._room
            self._room = found[1]


_ROOM = re.compile(r"/inference_engine/(\w+)")


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """What a collection calls, finalizers and its callbacks, comes at any time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


each_backend = pytest.mark.parametrize("backend", ["torch", "native"])


def forward_of(backend: str) -> Forward:
    return tiny_native() if backend == "native" else tiny_forward()


def hardly_moving() -> Callable[[], float]:
    """A clock by which so little time passes that nothing is done that is done now and then."""
    ticks = count()
    return lambda: next(ticks) / 1e6


def calls_of_the_verifier(forward: Forward) -> int:
    """Of one segment of single tokens, staged, computed, sampled and committed."""
    context = forward.open(forward.geometry(**PAGES), SMALL["kv_bytes"])
    verifier, kv = Verifier(forward, context), SessionKV(Full(), context, 512)
    assert kv.wake(512)
    ids = np.array(text(LENGTH + WARM_UP + SEGMENT), dtype=np.uint32)
    for start in range(0, LENGTH, SEGMENT):
        verifier.start([Block(kv=kv, token_ids=ids[start : start + SEGMENT])])
        kv.commit(start + SEGMENT)
    sampler, generated, calls = Sampler(Sampling(), seed=7), np.ones(1, dtype=np.bool_), Calls()

    def decode(position: int) -> None:
        verifier.start([Block(kv=kv, token_ids=ids[position : position + 1], generated=generated, sampler=sampler)])
        kv.commit(position + 1)

    for position in range(LENGTH, LENGTH + WARM_UP):
        decode(position)
    calls.begin()
    for position in range(LENGTH + WARM_UP, LENGTH + WARM_UP + SEGMENT):
        decode(position)
    calls.end()
    kv.release()
    return calls.count


def calls_of_steps_ahead(sessions: int) -> int:
    """Of one segment of tokens of so many sessions, on the engine's thread, from one launch to that of a later step."""
    forward = tiny_forward_on("cpu", ops=DeviceOps(attends_together=True))
    calls = Calls([f"/{room}/" for room in ("scheduler", "decode", "kv", "session", "engine")])
    launches: list[int] = []
    launch = forward.launch

    def counted(step: Step, fed: Tensor | None = None) -> Launched:
        if not launches:
            calls.begin()
        launches.append(calls.count)
        return launch(step, fed)

    with (
        patch.object(forward, "launch", counted),
        Engine(forward, EngineConfig(**SMALL, overlap="on"), clock=hardly_moving()) as engine,
    ):
        opened = [engine.create_session(strategy=Full()).session_id for _ in range(sessions)]
        for session in opened:
            engine.append(session, text(LENGTH))
            drain(engine.generate(session, GenerateParams(max_tokens=1)))
        launches.clear()
        with standing_still(engine):
            running = [engine.generate(session, GenerateParams(max_tokens=WARM_UP + SEGMENT + 2)) for session in opened]
        for generation in running:
            drain(generation)
    first = -(SEGMENT + 2)
    return launches[first + SEGMENT] - launches[first]


def calls_of_the_loop(forward: Forward, drafter: Drafter | None = None) -> int:
    """Of one segment of tokens on the engine's thread, from the forward of one step to that of a later one."""
    calls, ticks = Calls(), count()
    steps: list[int] = []

    def on_step(_: Step) -> None:
        if not steps:
            calls.begin()
        steps.append(calls.count)

    watched = WatchedForward(forward, on_step)
    with Engine(watched, EngineConfig(**SMALL), clock=lambda: next(ticks) / 1000, drafter=drafter) as engine:
        session = engine.create_session(strategy=Full()).session_id
        engine.append(session, text(LENGTH))
        drain(engine.generate(session, GenerateParams(max_tokens=WARM_UP + SEGMENT + 2)))
    first = -(SEGMENT + 2)
    return steps[first + SEGMENT] - steps[first]


def path_of_tokens(forward: Forward) -> tuple[float, float]:
    """Calls and changes of room of one token: half of those of a segment take no more."""
    path, seen = Path(), list[tuple[int, int]]()

    def on_event(event: Event) -> None:
        if isinstance(event, TokenCommitted):
            if not seen:
                sys.setprofile(path.saw)
            seen.append((path.calls, path.changes))

    with Engine(forward, EngineConfig(**SMALL), clock=hardly_moving()) as engine:
        session = engine.create_session(strategy=Full()).session_id
        engine.append(session, text(LENGTH))
        drain(engine.generate(session, GenerateParams(max_tokens=WARM_UP + SEGMENT + 2), listener=on_event))
    ends = pairwise(seen[-SEGMENT - 2 : -1])
    spent = [(calls - calls_before, changes - before) for (calls_before, before), (calls, changes) in ends]
    calls, changes = zip(*spent, strict=True)
    return median(calls), median(changes)


def test_each_call_is_counted_and_nothing_else() -> None:
    def called() -> None:
        abs(-1)  # is no Python

    calls = Calls()
    calls.begin()
    for _ in range(5):
        called()
    calls.end()
    called()
    assert calls.count == 5 + 1  # and `end`


@each_backend
def test_a_decode_step_of_the_verifier_calls_no_more_than_its_budget(backend: str) -> None:
    assert calls_of_the_verifier(forward_of(backend)) / SEGMENT <= VERIFIER_CALLS[backend]


@each_backend
def test_a_token_calls_no_more_than_its_budget_in_the_whole_loop(backend: str) -> None:
    assert calls_of_the_loop(forward_of(backend)) / SEGMENT <= LOOP_CALLS[backend]


def test_a_token_passes_through_few_calls_and_few_rooms() -> None:
    calls, changes = path_of_tokens(tiny_native())
    assert (calls <= OWN_CALLS, changes <= ROOM_CHANGES) == (True, True), (calls, changes)


def test_one_session_more_in_a_launched_step_calls_no_more_than_its_budget() -> None:
    few, more = 2, 6
    each = (calls_of_steps_ahead(more) - calls_of_steps_ahead(few)) / (more - few)
    assert each / SEGMENT <= SESSION_AHEAD_CALLS


def test_a_decision_on_drafts_calls_no_more_than_its_budget() -> None:
    assert calls_of_the_loop(tiny_native(), NgramDrafter(min_ngram=1)) / SEGMENT <= DRAFTING_CALLS
