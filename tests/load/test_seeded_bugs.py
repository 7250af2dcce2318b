"""The suite is proven, too: faults in a copy of the code are seen. (`make seeded-bugs` tries all of them.)"""

from __future__ import annotations

import pytest

from scripts.seeded_bugs import BUGS, ROOT, planted, try_all
from tests.further import further_test

SHORT = ("the window is one position too short",)


def test_every_bug_still_has_its_place_in_the_code(subtests: pytest.Subtests) -> None:
    for bug in BUGS:
        with subtests.test(bug.name):
            text = (ROOT / bug.path).read_text(encoding="utf-8")
            assert planted(bug, text) != text
            assert all((ROOT / test.partition("::")[0]).exists() for test in bug.tests)


@further_test
def test_some_of_them_are_caught() -> None:
    found = try_all([bug for bug in BUGS if bug.name in SHORT])
    assert len(found) == len(SHORT)
    assert all(each.caught_by for each in found)


def test_a_bug_without_a_place_or_with_two_is_refused() -> None:
    for text in ("nothing of the kind", BUGS[0].old * 2):
        with pytest.raises(ValueError, match="places"):
            planted(BUGS[0], text)
