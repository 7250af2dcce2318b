"""Kills of a server at random moments, in short; `make soak-kill` is the long form."""

from pathlib import Path

import pytest

from tests.load.kills import kill_often

KILLS = 10


@pytest.mark.parametrize("durability", ["process"])
def test_agents_notice_nothing_of_kills_but_a_pause(tmp_path: Path, durability: str) -> None:
    counts, wrong = kill_often(tmp_path / "state", durability, kills=KILLS, agents=3, seed=1)
    assert wrong == []
    assert counts["kills"] == KILLS
    assert counts["tokens"] > 0


def test_a_server_that_tells_before_it_records_is_caught(tmp_path: Path) -> None:
    """The control: so many kills are enough to notice."""
    _, wrong = kill_often(tmp_path / "state", "process", kills=20, agents=3, seed=2, is_early=True)
    assert wrong
