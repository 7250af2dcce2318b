"""How long a draft should be: a pure matter of what drafts gave and what steps took."""

from __future__ import annotations

import pytest

from inference_engine.decode.draft_length import Acceptance, Balance, StepSeconds, best_length, steps_between


def seen(*drafts: tuple[int, int]) -> Acceptance:
    acceptance = Acceptance()
    for proposed, accepted in drafts:
        acceptance.saw(proposed, accepted)
    return acceptance


def line(fixed: float, per_token: float, *, tokens: tuple[int, ...] = (1, 2, 3, 5, 8)) -> StepSeconds:
    steps = StepSeconds()
    for _ in range(50):
        for count in tokens:
            steps.saw(count, fixed + per_token * count, is_plain=count == tokens[0])
    return steps


def longest(acceptance: Acceptance, steps: StepSeconds, *, sessions: int = 1, draft_seconds: float = 0.0) -> int:
    return best_length(acceptance, steps, sessions=sessions, longest=8, draft_seconds=draft_seconds)


RIGHT, WRONG = seen(*[(8, 8)] * 100), seen(*[(8, 0)] * 100)


def test_right_draft_tokens_are_worth_the_longest_draft_where_tokens_are_cheap() -> None:
    assert longest(RIGHT, line(1.0, 0.01)) == 7


def test_wrong_draft_tokens_are_worth_none() -> None:
    assert longest(WRONG, line(1.0, 0.01)) == 0


def test_right_draft_tokens_are_worth_none_where_a_token_costs_a_step() -> None:
    assert longest(RIGHT, line(0.0, 1.0)) == 0


def test_a_slow_drafter_has_to_be_right_more_often() -> None:
    some = seen(*[(8, 2)] * 100)
    assert longest(some, line(1.0, 0.05)) > 0
    assert longest(some, line(1.0, 0.05), draft_seconds=2.5) == 0


def test_the_draft_ends_where_draft_tokens_stop_being_right() -> None:
    assert longest(seen(*[(8, 2)] * 100), line(1.0, 0.1)) == 2


def test_neighbours_that_wait_for_the_draft_tokens_count() -> None:
    half = seen(*[(1, 1), (1, 0)] * 50)
    assert longest(half, line(1.0, 0.3)) > 0
    assert longest(half, line(1.0, 0.3, tokens=(8, 9, 10, 12, 15)), sessions=8) == 0


def test_more_tokens_never_count_as_faster_whatever_was_measured() -> None:
    steps = StepSeconds()
    for _ in range(50):
        steps.saw(8, 0.5, is_plain=False)
        steps.saw(1, 1.0, is_plain=True)
    assert longest(WRONG, steps) == 0


@pytest.mark.parametrize("accepted", [0, 1, 7])
def test_a_session_loses_no_more_on_drafts_than_its_balance_whatever_is_expected(accepted: int) -> None:
    """Expectations that stay wrong: every draft is expected to be right."""
    steps, balance, plain, drafted, tokens = line(1.0, 0.4), Balance(), 1.4, 0.0, 0
    for _ in range(2000):
        balance.stepped()
        length = best_length(RIGHT, steps, sessions=1, longest=7, draft_seconds=0.1, most_cost=balance.steps)
        cost = steps.cost(1, length, 0.1, plain) if length else 0.0
        balance.pay(cost)
        balance.won(min(accepted, length), 1)
        tokens += 1 + min(accepted, length)
        drafted += plain * (1.0 + cost)
    assert drafted <= plain * (tokens + 2.0 + 0.01 * 2000)
    assert accepted < 7 or drafted < 0.6 * plain * tokens


def test_nothing_is_drafted_before_a_plain_step_is_known() -> None:
    assert longest(Acceptance(), StepSeconds()) == 0


def test_a_length_that_was_never_tried_is_tried_and_then_known() -> None:
    steps = line(1.0, 0.0, tokens=(1,))
    assert longest(RIGHT, steps) == 7
    for _ in range(3):
        steps.saw(8, 20.0, is_plain=False)
    assert longest(RIGHT, steps) < 7


def test_a_session_begins_with_the_acceptance_of_others_and_then_uses_its_own() -> None:
    new = Acceptance(RIGHT)
    assert new.rate(0) > 0.9 < new.rate(5)
    for _ in range(50):
        new.saw(4, 0)
    assert new.rate(0) < 0.1 < 0.9 < RIGHT.rate(0)


def test_the_first_step_of_a_shape_does_not_count() -> None:
    steps = StepSeconds()
    steps.saw(1, 60.0, is_plain=True)
    assert steps.expected(1) is None
    steps.saw(1, 1.0, is_plain=True)
    assert steps.expected(1) == 1.0


def test_steps_between_known_sizes_lie_on_the_line_and_larger_ones_cost_like_the_largest() -> None:
    steps = line(1.0, 0.5, tokens=(2, 10))
    assert steps.expected(4) == pytest.approx(3.0)
    assert steps.expected(1) == steps.expected(2)
    assert steps.expected(99) == steps.expected(10)


def test_one_slow_step_does_not_change_much() -> None:
    steps = line(1.0, 0.1)
    before = steps.expected(8)
    steps.saw(8, 100.0, is_plain=False)
    after = steps.expected(8)
    assert before is not None and after is not None
    assert after < 1.3 * before


def test_a_machine_that_slows_down_slows_steps_with_draft_tokens_as_much_as_plain_ones() -> None:
    steps = line(1.0, 0.5)
    for _ in range(100):
        steps.saw(1, 6.0, is_plain=True)
    assert steps.expected(1) == pytest.approx(6.0, rel=0.01)
    assert steps.expected(2) == pytest.approx(8.0, rel=0.01)
    assert steps.expected(8) == pytest.approx(20.0, rel=0.01)


def test_a_step_with_draft_tokens_that_takes_longer_says_nothing_of_plain_ones() -> None:
    steps = line(1.0, 0.1)
    before = steps.expected(1)
    steps.saw(8, 3.0, is_plain=False)
    assert steps.expected(1) == before


def test_a_long_draft_has_to_be_earned_whatever_others_showed() -> None:
    tokens = (1, 2, 3, 5, 8, 16)
    new = Acceptance(seen(*[(15, 15)] * 100))
    cheap = line(1.0, 0.001, tokens=tokens)

    def length() -> int:
        return best_length(new, cheap, sessions=1, longest=31, draft_seconds=0.0)

    assert length() == 7
    new.saw(7, 7)
    assert length() == 15
    new.saw(15, 15)
    assert length() == 31
    new.saw(31, 2)
    assert length() <= 7


def test_what_was_seen_long_ago_is_forgotten_of_a_session_sooner_than_of_all() -> None:
    common, session = seen(*[(4, 0)] * 100), Acceptance(WRONG)
    for acceptance, drafts in ((session, 100), (common, 100), (common, 400)):
        for _ in range(drafts):
            acceptance.saw(4, 4)
    assert session.rate(0) > 0.95
    assert common.rate(0) > 0.95


def test_a_few_wrong_drafts_do_not_stop_what_pays_for_others_and_many_do() -> None:
    """Of all drafts 0.6 begin right, and some go on. A draft costs 0.4 of a step, and so pays."""
    common = Acceptance()
    for _ in range(40):
        for accepted in (0, 1, 2, 0, 3):
            common.saw(7, accepted)
    session, steps = Acceptance(common), line(1.0, 0.005)
    assert longest(session, steps, draft_seconds=0.4) > 0
    for _ in range(6):
        session.saw(7, 0)
    assert longest(session, steps, draft_seconds=0.4) > 0
    for _ in range(24):
        session.saw(7, 0)
    assert longest(session, steps, draft_seconds=0.4) == 0


def test_what_all_give_is_not_turned_by_one_session() -> None:
    common = seen(*[(7, 3)] * 200)
    for _ in range(20):
        common.saw(7, 0)
    assert common.rate(0) > 0.7


def test_places_that_were_never_reached_resemble_the_last_one() -> None:
    acceptance = seen(*[(2, 2)] * 100)
    assert acceptance.rate(7) == acceptance.rate(1) > 0.95
    assert acceptance.rates(8) == [acceptance.rate(place) for place in range(8)]


def test_watching_takes_its_share_of_the_time_and_no_more() -> None:
    assert steps_between(0.5, 10.0, 0.01) == 5
    assert steps_between(1e-6, 10.0, 0.01) == 1
    assert steps_between(1.0, 0.0, 0.01) == 1
