"""What is known of how long things take."""

from __future__ import annotations

import pytest

from inference_engine.scheduler.step_time import CHUNK_SECONDS, ChunkPace, EndPace, StepPace


def pace(fixed: float, each: float, sizes: list[int]) -> StepPace:
    known = StepPace()
    for count in sizes:
        known.saw(count, fixed + each * count)
    return known


def test_steps_of_different_sizes_predict_what_any_other_takes() -> None:
    known = pace(0.010, 0.001, [1, 64, 1, 256, 1, 1, 32, 1])
    assert known.seconds(100) == pytest.approx(0.110)
    assert known.tokens_within(0.1101) == 100
    assert known.tokens_within(0.001) == 0


@pytest.mark.parametrize("token_seconds", [1e-5, 0.002, 0.021, 2.0])
@pytest.mark.parametrize("fixed_seconds", [0.0, 0.1])
def test_chunks_of_prefill_soon_take_the_time_they_may_and_a_pause_is_soon_forgotten(
    token_seconds: float, fixed_seconds: float
) -> None:
    page, most = 16, 4096
    pace = ChunkPace(least_tokens=page)
    for step in range(60):
        tokens = min(most, pace.tokens)
        seconds = fixed_seconds + tokens * token_seconds
        if step > 0 and step % 20:
            assert seconds <= 1.01 * CHUNK_SECONDS or tokens == page or step % 20 < 3
        if step % 20 > 12:
            assert seconds >= 0.8 * CHUNK_SECONDS or tokens == most
        pause = 30.0 if step % 20 == 0 else 0.0
        pace.saw(tokens, seconds + pause)


def test_a_place_comes_free_as_often_as_one_did_and_later_the_longer_none_does() -> None:
    ends = EndPace()
    assert ends.seconds_for(3, 0.0) == 1.0
    for second in range(10):
        ends.ended(float(second) * 2)
    assert ends.seconds_for(1, 20.0) == pytest.approx(2.0)
    assert ends.seconds_for(3, 20.0) == pytest.approx(6.0)
    assert ends.seconds_for(1, 100.0) == pytest.approx(10.0)
    assert ends.seconds_for(1000, 100.0) == 60.0
