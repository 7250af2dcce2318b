"""The journal's thread: what waited for a commit goes on before the journal is tidied, which comes all the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from inference_engine.metrics import EngineMetrics
from inference_engine.session.writer import Change, Writer


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
        self.writer.record([(lambda: None, ())])


@pytest.fixture
def untidy() -> Untidy:
    return Untidy()


def test_what_is_recorded_by_those_who_were_called_back_is_committed_before_anything_is_tidied(untidy: Untidy) -> None:
    def go_on() -> None:
        untidy.seen.append("called")
        untidy.record()
        untidy.writer.say(lambda: untidy.seen.append("called again"))

    untidy.record()
    untidy.writer.say(go_on)
    assert untidy.tidied.wait(20)
    untidy.writer.stop()
    assert untidy.seen == ["commit", "called", "commit", "called again", "tidy"]


def test_a_journal_that_is_never_quiet_is_tidied(untidy: Untidy) -> None:
    rounds, is_over = 100, threading.Event()

    def go_on() -> None:
        nonlocal rounds
        rounds -= 1
        if rounds:
            untidy.record()
            untidy.writer.say(go_on)
        else:
            is_over.set()

    go_on()
    assert is_over.wait(20)
    untidy.writer.stop()
    commits, tidied = untidy.seen.count("commit"), untidy.seen.count("tidy")
    assert commits == 99
    assert 10 <= tidied < 50


def test_a_writer_that_stops_tidies_first(untidy: Untidy) -> None:
    done = threading.Event()
    untidy.record()
    untidy.writer.say(done.set)
    assert done.wait(20)
    untidy.writer.stop()
    assert untidy.seen == ["commit", "tidy"]
