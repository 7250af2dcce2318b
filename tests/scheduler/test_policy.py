"""The choice of a step: budgets hold, no request starves, and owners take turns."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from inference_engine.scheduler.policy import (
    Candidate,
    Targets,
    admit,
    choose,
    chunk_beside_decoders,
    places,
)
from tests.further import each_pair

owners = st.sampled_from(["", "a", "b", "c"])
candidates = st.lists(
    st.one_of(
        st.builds(Candidate, tokens=st.just(1), is_prefilling=st.just(False), owner=owners),
        st.builds(Candidate, tokens=st.integers(1, 256), is_prefilling=st.just(True), owner=owners),
    ),
    min_size=1,
    max_size=40,
)


class Line:
    """Requests that are served again and again, as the loop does it."""

    def __init__(self, waiting: list[Candidate], max_batch: int) -> None:
        self._line = deque(enumerate(waiting))
        self._max_batch = max_batch
        self._turns: dict[tuple[str, bool], int] = {}
        self._steps = 0

    def add(self, name: int, candidate: Candidate) -> None:
        self._line.append((name, candidate))

    def step(self) -> list[int]:
        """Which were served."""
        self._steps += 1
        turned = [replace(one, turn=self._turns.get((one.owner, one.is_prefilling), 0)) for _, one in self._line]
        picked = choose(turned, step_tokens=256, max_batch=self._max_batch, prefill_tokens_beside=256)
        chosen = [self._line[index] for index in picked]
        for entry in chosen:
            self._turns[entry[1].owner, entry[1].is_prefilling] = self._steps
            self._line.remove(entry)
            self._line.append(entry)
        return [name for name, _ in chosen]


@given(candidates, st.integers(1, 16))
def test_a_step_stays_within_its_budgets_and_is_never_empty(waiting: list[Candidate], max_batch: int) -> None:
    chosen = choose(waiting, step_tokens=256, max_batch=max_batch, prefill_tokens_beside=256)
    assert 1 <= len(chosen) == len(set(chosen)) <= max_batch
    beside = sum(not waiting[index].is_prefilling for index in chosen)
    assert sum(waiting[index].tokens for index in chosen) <= 256 + beside


@given(candidates, st.integers(1, 16))
@example([Candidate(tokens, True, owner) for tokens, owner in ((1, ""), (128, ""), (129, "a"), (129, "b"))], 2)
def test_every_request_is_served_before_long(waiting: list[Candidate], max_batch: int) -> None:
    """An owner's turn comes at least every few steps, and the turn of each of its requests every few of those."""
    line, served = Line(waiting, max_batch), Counter[int]()
    for _ in range(4 * 2 * len(waiting)):
        served.update(line.step())
    assert set(served) == set(range(len(waiting)))


@each_pair(max_batch=[1, 2, 8, 64], kinds=[(True,), (False,), (True, False)], is_prefilling=[True, False])
def test_an_owner_that_floods_delays_another_owners_only_request_by_a_step_at_most(
    max_batch: int, kinds: tuple[bool, ...], is_prefilling: bool
) -> None:
    flood = [Candidate(256 if kinds[index % len(kinds)] else 1, kinds[index % len(kinds)], "a") for index in range(100)]
    line = Line(flood, max_batch)
    for _ in range(7):
        line.step()
    line.add(-1, Candidate(256 if is_prefilling else 1, is_prefilling, "b"))
    # With places for one, two kinds of the flood's may have been served longer ago than any of the other owner's.
    slack = 1 if max_batch > 1 else 2
    served = [-1 in line.step() for _ in range(40)]
    unserved = "".join("." if is_there else "x" for is_there in served).split(".")
    assert max(map(len, unserved)) <= slack


def test_within_a_step_owners_share_places_equally_and_take_what_others_leave() -> None:
    waiting = [Candidate(1, False, "a")] * 10 + [Candidate(1, False, "b")] * 3 + [Candidate(1, False, "c")]
    by_owner = Counter(waiting[index].owner for index in choose(waiting, step_tokens=64, max_batch=9))
    assert by_owner == {"a": 5, "b": 3, "c": 1}


def test_short_prefills_share_a_step_beside_decoding_requests_as_far_as_one_long_one_would_go() -> None:
    waiting = [
        Candidate(1, False),
        Candidate(100, True),
        Candidate(100, True),
        Candidate(100, True),
        Candidate(9, True),
    ]
    assert choose(waiting, step_tokens=512, max_batch=8, prefill_tokens_beside=256) == [0, 1, 2, 4]
    assert choose(waiting, step_tokens=512, max_batch=3, prefill_tokens_beside=256) == [0, 1, 2]
    assert choose(waiting, step_tokens=512, max_batch=8, prefill_tokens_beside=16) == [0, 1]


# -- which begins -----------------------------------------------------------------------------------------------------


@given(
    st.lists(owners, max_size=30),
    st.dictionaries(owners, st.integers(0, 6)),
    st.integers(1, 12),
    st.integers(0, 4),
)
def test_admission_fills_what_is_free_keeps_the_limits_and_leaves_no_owner_out(
    waiting: list[str], running: dict[str, int], most: int, most_per_owner: int
) -> None:
    begun = admit(waiting, running, most=most, most_per_owner=most_per_owner)
    counts = Counter(running)
    assert len(begun) == len(set(begun))
    for index in begun:
        owner = waiting[index]
        assert places(owner, counts, most=most, most_per_owner=most_per_owner) > 0
        counts[owner] += 1
    left = [owner for index, owner in enumerate(waiting) if index not in begun]
    assert all(places(owner, counts, most=most, most_per_owner=most_per_owner) == 0 for owner in left)
    for owner in set(waiting):
        assert most_per_owner == 0 or counts[owner] <= max(most_per_owner, running.get(owner, 0))
        assert counts[owner] >= 1, "an owner with nothing running does not wait"
        own = [index for index in begun if waiting[index] == owner]
        assert own == sorted(own), "first come, first served, within an owner"


# -- how much ---------------------------------------------------------------------------------------------------------


def tokens(
    targets: Targets, *, pending: int = 1000, waited: float = 0.0, chunk: float | None = 0.5, fit: int | None = 64
) -> int:
    return chunk_beside_decoders(
        targets,
        pending=pending,
        waited_seconds=waited,
        least_tokens=16,
        segment_tokens=256,
        most_queries=512,
        seconds_of_chunk=chunk,
        tokens_in_time=fit,
    )


def test_a_chunk_lets_the_others_have_their_tokens_in_time_and_always_moves() -> None:
    assert tokens(Targets(inter_token_seconds=0.1), fit=64) == 64
    assert tokens(Targets(inter_token_seconds=0.1), fit=1000) == 256
    assert tokens(Targets(inter_token_seconds=0.1), fit=-5) == 16
