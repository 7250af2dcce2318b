"""The simulation of servers over one database: what it must say where that can be known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laboratory.evaluation.growing import Costs, after_a_death, simulated

COSTS = Costs(
    commit=0.001,
    row=1e-5,
    sync=0.0,
    trip=0.002,
    step=0.02,
    streams=10,
    token=1e-4,
    restore=0.01,
    prefill=1e-4,
    history=1000,
)


def test_one_server_s_tokens_are_late_by_a_commit_and_its_trip() -> None:
    found = simulated(COSTS, 1, 1)
    assert found.tokens_per_second == pytest.approx(500, rel=0.02)
    assert found.late == pytest.approx([0.002 + 0.001 + 10 * 1e-5] * len(found.late))
    assert found.database == pytest.approx(0.0011 / 0.02, rel=0.02)


def test_a_database_that_cannot_commit_each_step_makes_commits_larger_and_tokens_late() -> None:
    few, many = (simulated(COSTS, servers, 1) for servers in (10, 60))
    assert few.database < 0.6 and max(few.late) < 0.02
    assert many.database == pytest.approx(1.0, abs=0.02), "and no more than that"
    assert min(many.late) > max(few.late)
    assert many.tokens_per_second == pytest.approx(6 * few.tokens_per_second, rel=0.01), "steps go on"
    assert simulated(COSTS, 60, 4).database == pytest.approx(60 * 0.0011 / 0.02 / 4, rel=0.05)


def test_a_sync_is_waited_for_that_begins_when_all_is_written() -> None:
    found = simulated(replace(COSTS, sync=0.005), 1, 1)
    assert min(found.late) >= 0.0031 + 0.005 and max(found.late) <= 0.0031 + 0.01 + 1e-9


def test_streams_of_a_server_that_died_are_there_again_sooner_where_more_servers_share_them() -> None:
    two, many = after_a_death(COSTS, 2), after_a_death(COSTS, 100)
    assert two[-1] == pytest.approx(10 * 0.11)
    assert many[-1] < two[-1] / 2 and many[0] == pytest.approx(0.11)
