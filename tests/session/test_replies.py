"""What is remembered of calls, for how long, and that no owner's calls make another's be forgotten."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inference_engine.errors import InvalidArgument, RequestIdReused
from inference_engine.session.replies import KEEP_SECONDS, MOST_ENDED_PER_OWNER, Call, Replies, identify
from inference_engine.types import Constraint, ConstraintKind, GenerateParams, Sampling


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def call(number: int, *content: object, owner: str = "me", session_id: str = "") -> Call:
    made = identify(request_id(number), *content, owner=owner, session_id=session_id)
    assert made is not None
    return made


def replies(clock: Clock, *, most_per_session: int = 4) -> Replies[str]:
    return Replies(clock, most_per_session=most_per_session, keep_seconds=KEEP_SECONDS)


def test_an_id_has_sixteen_bytes(subtests: pytest.Subtests) -> None:
    for length in (1, 15, 17, 1000):
        with subtests.test(str(length)):
            with pytest.raises(InvalidArgument, match=f"got {length}") as caught:
                identify(bytes(length), owner="me")
            assert caught.value.field == "request_id"


def test_the_same_call_is_recalled_and_the_same_id_with_another_content_refused() -> None:
    kept = replies(Clock())
    kept.remember(call(1, "a", (1, 2)), "reply", session_id="s")
    assert kept.recall(call(1, "a", (1, 2))) == "reply"
    assert kept.recall(call(2, "a", (1, 2))) is None
    for other in (call(1, "a", (1, 3)), call(1, "a"), call(1, "a", (1, 2), None)):
        with pytest.raises(RequestIdReused):
            kept.recall(other)


def test_ids_are_an_owners_own_or_a_sessions() -> None:
    kept = replies(Clock())
    kept.remember(call(1, "a"), "mine", session_id="s")
    kept.remember(call(1, "b", session_id="t"), "the session's", session_id="t")
    assert kept.recall(call(1, "b", owner="you")) is None
    assert kept.recall(call(1, "a", session_id="t2")) is None
    assert kept.recall(call(1, "a")) == "mine"
    assert kept.recall(call(1, "b", session_id="t")) == "the session's"
    assert kept.knows(request_id(1), owner="me")
    assert not kept.knows(request_id(1), owner="you")


def digests(*contents: tuple[object, ...]) -> set[bytes]:
    return {call(1, *content).digest for content in contents}


def test_contents_that_differ_in_anything_have_different_digests() -> None:
    params = GenerateParams(max_tokens=3, sampling=Sampling(logit_bias={1: 0.5, 2: 1.0}, seed=7))
    changed: dict[str, Any] = {
        "max_tokens": 4,
        "sampling": Sampling(seed=7),
        "stop_token_ids": (1,),
        "logprobs": True,
        "top_logprobs": 2,
        "expected_history_length": 5,
        "drafting": False,
        "constraint": Constraint(kind=ConstraintKind.REGEX, source="a"),
        "stop_sequences": ((1, 2),),
        "min_tokens": 2,
    }
    assert list(changed) == [field.name for field in dataclasses.fields(params)]
    others: list[tuple[object, ...]] = [
        # Likeliest tokens are asked for with log-probabilities alone.
        (dataclasses.replace(params, **{name: value, **({"logprobs": True} if name == "top_logprobs" else {})}),)
        for name, value in changed.items()
    ]
    others += [(params,), (b"ab", b"c"), (b"a", b"bc"), (b"abc",), ("abc",), (["a", "bc"],), (None,), (0,), ()]
    assert len(digests(*others)) == len(others)


def test_a_field_that_a_later_version_adds_changes_no_digest_until_it_is_used() -> None:
    """A retry may come after an upgrade of the server."""
    kinds = [("first", int, 0), *_fields_of(GenerateParams), ("last", tuple, ()), ("more", Any, None)]
    later = dataclasses.make_dataclass("GenerateParams", kinds, kw_only=True)
    given: dict[str, Any] = {"max_tokens": 3, "sampling": Sampling(seed=7)}
    same = [GenerateParams(**given), later(**given)]
    others = [later(**given, **{name: value}) for name, value in {"first": 1, "last": (1,), "more": 0}.items()]
    assert len(digests(*((one,) for one in same))) == 1
    assert len(digests(*((one,) for one in same + others))) == 4


def _fields_of(kind: type[Any]) -> list[tuple[str, Any, Any]]:
    return [
        (field.name, field.type, dataclasses.field(default=field.default, default_factory=field.default_factory))
        for field in dataclasses.fields(kind)
    ]


def test_a_living_session_keeps_its_newest_replies() -> None:
    clock = Clock()
    kept = replies(clock)
    for number in range(6):
        kept.remember(call(number), str(number), session_id="s")
    kept.remember(call(100), "another session's", session_id="t")
    clock.now += 100 * KEEP_SECONDS
    kept.expire()
    assert [kept.recall(call(number)) for number in range(6)] == [None, None, "2", "3", "4", "5"]
    assert kept.recall(call(100)) == "another session's"


def test_the_replies_of_a_session_that_ended_are_kept_for_some_time() -> None:
    clock = Clock()
    kept = replies(clock)
    kept.remember(call(1), "reply", session_id="s")
    kept.session_ended("s", "me")
    clock.now += KEEP_SECONDS - 1
    kept.expire()
    assert kept.recall(call(1)) == "reply"
    clock.now += 1
    kept.expire()
    assert kept.recall(call(1)) is None
    assert len(kept) == 0


def test_an_owner_that_opens_and_closes_without_end_is_bounded_and_displaces_no_other() -> None:
    kept = replies(Clock())
    kept.remember(call(1, owner="you"), "yours", session_id="your session")
    kept.session_ended("your session", "you")
    for number in range(MOST_ENDED_PER_OWNER + 50):
        kept.remember(call(number), "mine", session_id=f"session {number}")
        kept.session_ended(f"session {number}", "me")
    assert len(kept) == MOST_ENDED_PER_OWNER + 1
    assert kept.recall(call(1, owner="you")) == "yours"
    assert kept.recall(call(49)) is None
    assert kept.recall(call(50)) == "mine"


def test_owners_whose_sessions_ended_at_different_times_are_forgotten_each_in_time() -> None:
    clock = Clock()
    kept, ended = replies(clock), dict[int, float]()
    for number in range(12):
        kept.remember(call(number, owner=f"owner {number % 4}"), "reply", session_id=f"s{number}")
    for number in (7, 0, 3, 10, 4, 8, 1, 11, 2, 9, 6, 5):
        clock.now += 70.0
        kept.session_ended(f"s{number}", f"owner {number % 4}")
        ended[number] = clock.now
        kept.expire()
        for each in range(12):
            is_kept = clock.now - ended.get(each, clock.now) < KEEP_SECONDS
            assert (kept.recall(call(each, owner=f"owner {each % 4}")) is not None) == is_kept
    clock.now += KEEP_SECONDS
    kept.expire()
    assert len(kept) == 0
