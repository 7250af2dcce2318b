"""The two SDKs have the same public names, but where it is said why not."""

from __future__ import annotations

from scripts.reference import python_api, typescript_api
from scripts.reference.api import Entry, Member
from scripts.reference.sdk_names import Differences, Row, compare


def test_no_name_is_missing_on_either_side() -> None:
    rows = compare(python_api.entries(), typescript_api.entries(), Differences.read())
    assert not [row for room in rows.values() for row in room if row.is_gap]


def test_every_difference_that_is_explained_is_still_there() -> None:
    differences = Differences.read()
    compare(python_api.entries(), typescript_api.entries(), differences)
    assert not differences.unused


def session(declaration: str, *members: str) -> Entry:
    return Entry(
        name="Session",
        room="_session",
        declaration=declaration,
        says="",
        members=tuple(Member(name=name, signature=": int") for name in members),
    )


def test_a_name_that_one_side_lacks_is_a_gap_on_that_side() -> None:
    rows = compare([session("class", "shared_bytes")], [session("class", "peakBytes")], Differences())
    assert [row for room in rows.values() for row in room if row.is_gap] == [
        Row(python="Session.shared_bytes"),
        Row(typescript="Session.peakBytes"),
    ]
