"""The journal's thread: what waited for a commit goes on before the journal is tidied, which comes all the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from inference_engine.metrics import EngineMetrics
from inference_engine.session.writer import Change, DiskFull, Unit, Writer


class Untidy:
    """What a writer does, in order. It is untidy after each commit."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_tidy = True
        self.tidied = threading.Event()
        self.writer = Writer(self.commit, self.tidy, lambda: self.is_tidy, EngineMetrics())

    def commit(self, changes: Sequence[Change]) -> None:
        self.seen.append("commit")
        self.is_tidy = False

    def tidy(self) -> None:
        if not self.is_tidy:
            self.seen.append("tidy")
            self.is_tidy = True
            self.tidied.set()

    def record(self) -> None:
        self.writer.record(Unit(changes=[(lambda: None, ())]))


@pytest.fixture
def untidy() -> Untidy:
    return Untidy()


def test_what_is_recorded_by_those_who_were_called_back_is_committed_before_anything_is_tidied(untidy: Untidy) -> None:
    def go_on() -> None:
        untidy.seen.append("called")
        untidy.record()
        untidy.writer.on_saved(lambda: untidy.seen.append("called again"))

    untidy.record()
    untidy.writer.on_saved(go_on)
    assert untidy.tidied.wait(20)
    untidy.writer.stop()
    assert untidy.seen == ["commit", "called", "commit", "called again", "tidy"]


def test_what_is_recorded_while_the_disk_has_no_room_to_tidy_is_committed_when_the_writer_stops() -> None:
    commits: list[Sequence[Change]] = []
    has_begun, may_fail = threading.Event(), threading.Event()

    def tidy() -> None:
        has_begun.set()
        assert may_fail.wait(20)
        raise DiskFull

    writer = Writer(commits.append, tidy, lambda: False, EngineMetrics())
    called: list[str] = []
    writer.record(Unit(changes=[(lambda: None, ())]))
    writer.on_saved(lambda: called.append("first"))
    assert has_begun.wait(20)
    writer.record(Unit(changes=[(lambda: None, ())]))
    writer.on_saved(lambda: called.append("second"))
    stopping = threading.Thread(target=writer.stop)
    stopping.start()
    while not writer._is_stopping:
        stopping.join(0.001)
    may_fail.set()
    stopping.join(20)
    assert not stopping.is_alive() and not writer.failure
    assert len(commits) == 2 and called == ["first", "second"]


@pytest.mark.parametrize("tidies", [True, False])
def test_a_writer_of_a_tool_leaves_things_as_they_are(*, tidies: bool) -> None:
    seen: list[str] = []
    writer = Writer(
        lambda _: None, lambda: seen.append("tidied"), lambda: bool(seen), EngineMetrics(), tidies_at_the_end=tidies
    )
    writer.stop()
    assert seen == (["tidied"] if tidies else [])
