"""The choice of a step: budgets hold, nobody starves."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from inference_engine.scheduler.policy import Candidate, choose

candidates = st.lists(
    st.one_of(
        st.builds(Candidate, rows=st.just(1), is_prefilling=st.just(False)),
        st.builds(Candidate, rows=st.integers(1, 256), is_prefilling=st.just(True)),
    ),
    min_size=1,
    max_size=40,
)


@given(candidates, st.integers(1, 16))
def test_a_step_stays_within_its_budgets_and_is_never_empty(waiting: list[Candidate], max_batch: int) -> None:
    chosen = choose(waiting, step_rows=256, max_batch=max_batch)
    assert 1 <= len(chosen) == len(set(chosen)) <= max_batch
    beside = sum(not waiting[index].is_prefilling for index in chosen)
    assert sum(waiting[index].rows for index in chosen) <= 256 + beside


@given(candidates, st.integers(1, 16))
def test_everybody_is_served_within_as_many_steps_as_there_are_requests(
    waiting: list[Candidate], max_batch: int
) -> None:
    line = deque(enumerate(waiting))
    served: Counter[int] = Counter()
    for _ in range(2 * len(waiting)):
        chosen = [line[index] for index in choose([c for _, c in line], step_rows=256, max_batch=max_batch)]
        for entry in chosen:
            served[entry[0]] += 1
            line.remove(entry)
            line.append(entry)
    assert set(served) == set(range(len(waiting)))


def test_decoding_requests_run_beside_one_prefill() -> None:
    waiting = [Candidate(256, True), Candidate(1, False), Candidate(256, True), Candidate(1, False)]
    assert choose(waiting, step_rows=512, max_batch=8) == [1, 3, 0]


def test_prefills_share_a_step_when_nobody_decodes() -> None:
    waiting = [Candidate(256, True), Candidate(256, True), Candidate(256, True)]
    assert choose(waiting, step_rows=512, max_batch=8) == [0, 1]
