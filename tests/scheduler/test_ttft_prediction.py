"""What is done before a Generate has its first token, by playing the queue forward."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.engine.generation import Generation
from inference_engine.scheduler import ttft_prediction
from inference_engine.scheduler.policy import admit
from inference_engine.scheduler.request import Prediction
from inference_engine.scheduler.ttft_prediction import Lengths, Load, QueuePlay, Room
from inference_engine.types import GenerateParams
from laboratory.scripted import Script
from tests.laws.variants import drain
from tests.lines import lines_of
from tests.load.scripted import scripted_engine

# On an event loop. A line takes 0.1 us on a quiet machine, and a call may take 5 ms.
MOST_LINES = 50_000
ROOM = Room(max_running=2, max_running_per_owner=0, max_batch=2, segment_tokens=10)


def decoding(tokens: int, owner: str = "") -> Load:
    return Load(owner, 0, tokens, tokens)


def waiting(tokens: int, owner: str = "", prefill: int = 10) -> Load:
    return Load(owner, prefill, tokens, tokens)


def steps(new: Load, running: list[Load], queue: list[Load], room: Room = ROOM) -> float:
    return QueuePlay(new.owner, running, queue, room).until(new).steps


def test_a_place_comes_free_when_the_first_running_generate_has_all_its_tokens() -> None:
    assert steps(waiting(5), [decoding(7), decoding(30)], []) == 7
    assert steps(waiting(5), [decoding(7), decoding(30)], [waiting(4)]) == 7 + 4  # one of the four with its prefill


def test_an_owner_that_runs_nothing_waits_for_no_place_and_owners_take_turns() -> None:
    running = [decoding(50, "a"), decoding(60, "a")]
    flood = [waiting(20, "a") for _ in range(50)]
    assert steps(waiting(5, "b"), running, flood) == 1
    # With three that run, two have to end before the flood's next; then it is the turn of the owner that has fewer.
    assert steps(waiting(5, "b"), [*running, decoding(10, "b")], flood) < steps(
        waiting(5, "a"), [*running, decoding(10, "b")], flood
    )


def test_owners_that_have_their_share_wait_for_their_own_places_as_others_go_on_asking() -> None:
    assert steps(waiting(5, "a"), [decoding(30, "a"), decoding(4, "b")], []) == 30
    assert steps(waiting(5, "a"), [decoding(30, "b"), decoding(4, "b")], []) == 1
    room = Room(max_running=3, max_running_per_owner=0, max_batch=3, segment_tokens=10)
    assert steps(waiting(5, "a"), [decoding(30, "a"), decoding(4, "b"), decoding(9, "b")], [], room) == 4


def begins_after(new: Load, running: list[Load], queue: list[Load], room: Room) -> int:
    """The step after which `admit` itself lets `new` begin, where a Generate's tokens are one a step."""
    line, now = [*queue, new], 0
    left = [(load.owner, load.tokens, load.all_tokens) for load in running]
    while True:
        if now or not running:  # else a step is under way
            counts = Counter(owner for owner, _, _ in left)
            begun = admit(
                [load.owner for load in line],
                counts,
                most=room.max_running,
                most_per_owner=room.max_running_per_owner,
            )
            if any(line[index] is new for index in begun):
                return now
            left += [(line[index].owner, line[index].tokens, line[index].all_tokens) for index in begun]
            line = [load for index, load in enumerate(line) if index not in begun]
        now += 1
        ended = sorted((owner, tokens) for owner, rest, tokens in left if rest == 1)
        left = [(owner, rest - 1, tokens) for owner, rest, tokens in left if rest > 1]
        waits = Counter(load.owner for load in line)
        for owner, tokens in ended:
            waits[owner] -= 1
            if waits[owner] < 0 and owner != new.owner:  # it goes on asking
                line.append(decoding(int(tokens), owner))


@pytest.mark.parametrize(("most_tokens", "names"), [(20, "abc"), (4, "abcd"), (2, "ab")])
def test_places_are_given_as_admission_gives_them(most_tokens: int, names: str) -> None:
    """Often several end in one step: their places are given away together, as `admit` does between two steps."""
    rng = random.Random(1)

    def some(most: int, prefill_tokens: int) -> list[Load]:
        return [
            waiting(rng.randint(1, most_tokens), rng.choice(names), prefill=prefill_tokens)
            for _ in range(rng.randint(0, most))
        ]

    with patch.object(ttft_prediction, "MOST_ENDS", 10**6):
        for _ in range(2000):
            room = Room(
                max_running=rng.randint(1, 10),
                max_running_per_owner=rng.randint(0, 3),
                max_batch=1000,
                segment_tokens=10**9,  # prefills take no steps of their own
            )
            running, queue, new = some(10, 0), some(16, 40), waiting(1, rng.choice(names))
            found = steps(new, running, queue, room)
            expected = begins_after(new, running, queue, room)
            assert found == pytest.approx(expected, abs=1e-6), (running, queue, new, room)


@pytest.mark.parametrize("owner", ["0", "new"])
@pytest.mark.parametrize(("waits", "owners"), [(256, 64), (1000, 1000)])
def test_the_longest_queue_there_may_be_is_played_in_few_lines(waits: int, owners: int, owner: str) -> None:
    room = Room(max_running=128, max_running_per_owner=0, max_batch=64, segment_tokens=256)
    running = [decoding(500 + number, str(number % 16)) for number in range(128)]
    queue = [waiting(500, str(number % owners)) for number in range(waits)]
    assert lines_of(lambda: steps(waiting(5, owner), running, queue, room)) < MOST_LINES


def test_the_lengths_of_an_owners_generates_are_known_from_its_own() -> None:
    lengths = Lengths()
    assert lengths.share("whole", 100) == 1.0
    for _ in range(500):
        lengths.saw("whole", 100, 100)
        lengths.saw("hasty", 100, 1)  # it cancels them, or has them end at once
    assert lengths.share("whole", 100) == pytest.approx(1.0, abs=1e-3)
    assert lengths.share("hasty", 100) == pytest.approx(0.01, abs=1e-3)
    # Each owner has one voice for those whose first it is, however many Generates it has.
    for _ in range(500):
        lengths.saw("hasty", 100, 1)
    assert lengths.share("new", 100) == pytest.approx(0.505, abs=1e-3)
    # Of a size that no Generate had, hardly more than some times as many tokens as the owner's others.
    assert 4 * 100 <= 10_000 * lengths.share("whole", 10_000) < 6 * 100
    assert 4 * 1 <= 10_000 * lengths.share("hasty", 10_000) < 8 * 1


def test_a_wait_is_predicted_for_the_queue_as_it_is_at_each_call() -> None:
    """What is kept for the next call of an owner is given up when a call joins, begins or leaves."""
    predict, script = ttft_prediction.TTFTPredictor.predict, Script()
    in_step, go_on, waits = threading.Event(), threading.Event(), list[float]()

    def noted(self: ttft_prediction.TTFTPredictor, *queue: Any, changes: int) -> Prediction | None:
        found = predict(self, *queue, changes=changes)
        self._plays.clear()
        self._queue = None
        assert found == predict(self, *queue, changes=changes)
        if found is not None:
            waits.append(found.wait)
        return found

    def hold(_step: int) -> None:
        in_step.set()
        assert go_on.wait(60)

    with (
        scripted_engine(script=script, max_running=1, max_first_token_seconds=600.0) as engine,
        patch.object(ttft_prediction.TTFTPredictor, "predict", noted),
    ):
        sessions = [engine.create_session(owner="a").session_id for _ in range(4)]

        def asked(session: str) -> Generation:
            engine.append(session, [1, 2, 3], owner="a")
            return engine.generate(session, GenerateParams(max_tokens=8), owner="a")

        drain(asked(sessions[0]))  # so that it is known what steps take
        waits.clear()
        for _ in range(2):
            script.on_step = hold
            first = asked(sessions[0])
            assert in_step.wait(30)
            behind = [asked(session) for session in sessions[1:]]
            script.on_step = None
            go_on.set()
            for generation in (first, *behind):
                drain(generation)
            in_step.clear()
            go_on.clear()
    for start in (0, 4):
        one, *others = waits[start : start + 4]
        assert one < others[0] < others[1] < others[2]
