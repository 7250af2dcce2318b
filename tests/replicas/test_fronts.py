"""Servers that share a database, behind the proxies of `deploy` and behind TCP, in short: `make soak-replicas` is the
long form."""

from __future__ import annotations

import pytest

from tests.further import further_test
from tests.replicas.replicas import EARLY, TCP, UNPROVED, disturb


@further_test
@pytest.mark.parametrize(
    ("how", "name", "count"),
    [
        ("kill", "envoy", 18),
        ("kill", "haproxy", 18),
        ("kill", "nginx", 8),
        ("kill", TCP, 18),
        ("freeze", "envoy", 2),
        ("freeze", "haproxy", 2),
        ("freeze", TCP, 2),
        ("roll", "envoy", 3),
        ("roll", "haproxy", 3),
        ("database", "envoy", 3),
        ("promote", TCP, 2),
    ],
)
def test_agents_of_both_sdks_notice_pauses_alone(how: str, name: str, count: int) -> None:
    # One that is killed may lose what it was not asked to sync.
    durability = "power" if how in ("database", "promote") else "process"
    counts, wrong, gave_up, _ = disturb(
        how, name, count=count, seed=1, durability=durability, agents=5, away_seconds=2.0
    )
    assert (wrong, gave_up) == ([], [])
    assert counts["disturbances"] == count
    assert counts["tokens"] > 0


@further_test
@pytest.mark.parametrize(("how", "control"), [("kill", EARLY), ("freeze", UNPROVED)])
def test_servers_with_a_known_bug_are_caught(how: str, control: str) -> None:
    _, wrong, _, _ = disturb(how, TCP, count=20, seed=2, control=control)
    assert wrong
