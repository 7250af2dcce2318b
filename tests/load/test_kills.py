"""Kills of a server at random moments, in short; `make soak-kill` is the long form."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference_engine.config import child_environment
from tests.further import further_test
from tests.kept import Database
from tests.load.kills import (
    ROOT,
    Agents,
    NodeAgents,
    Nursery,
    has_node_agents,
    kill_often,
    lives,
    nurseries,
)

KILLS, PIPED_KILLS = 6, 90


@pytest.fixture(params=[Agents, NodeAgents], ids=["python", "typescript"])
def of(request: pytest.FixtureRequest) -> type[Agents] | type[NodeAgents]:
    if request.param is NodeAgents and not has_node_agents():
        pytest.skip("the TypeScript SDK is not built: npm ci && npm run build in sdks/typescript")
    kind: type[Agents] | type[NodeAgents] = request.param
    return kind


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nurseries() as made:
        yield made


def test_agents_notice_nothing_of_kills_but_a_pause(
    tmp_path: Path, of: type[Agents] | type[NodeAgents], nursery: Nursery
) -> None:
    counts, wrong, gave_up = kill_often(
        tmp_path / "state", "process", kills=KILLS, agents=3, seed=1, of=of, nursery=nursery
    )
    assert (wrong, gave_up) == ([], [])
    assert counts["kills"] == KILLS
    assert counts["tokens"] > 0


@further_test
def test_agents_of_a_server_on_postgres_notice_nothing_of_kills_but_a_pause(
    database: Database, of: type[Agents] | type[NodeAgents], nursery: Nursery
) -> None:
    counts, wrong, gave_up = kill_often(database.dsn, "process", kills=KILLS, agents=3, seed=1, of=of, nursery=nursery)
    assert (wrong, gave_up) == ([], [])
    assert counts["kills"] == KILLS
    assert counts["tokens"] > 0


def test_agents_without_an_answer_gave_up_and_nothing_was_lost(
    tmp_path: Path, of: type[Agents] | type[NodeAgents], nursery: Nursery
) -> None:
    """A machine may be too busy for a life to answer anything. Once no server is killed, no answer is a fault."""
    with lives(nursery, tmp_path / "state", "process") as server:
        server.begin()
        amid, after = (of(server.target, 2, seed, patience_seconds=1.0) for seed in (1, 2))
        waited_for(lambda: min(amid.counts["sessions"], after.counts["sessions"]) >= 2)
        server.kill()
        after.finish(30.0)
        waited_for(lambda: len(amid.gave_up) == 2)
        amid.finish(30.0)
        assert (len(amid.gave_up), len(amid.wrong)) == (2, 0)
        assert (len(after.gave_up), len(after.wrong)) == (0, 2)
        server.begin()


def waited_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# A process forks the lives of an engine, and must have no threads when it does: one of its own.
PIPED = """
import json
import sys
from pathlib import Path
from tests.load.piped import kill_engines
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
found = [
    kill_engines(folder / f"{is_early}", "power", kills=count, agents=6, seed=1, is_early=is_early)
    for is_early, count in ((True, 20), (False, kills))
]
print(json.dumps([[counts, wrong] for counts, wrong, _ in found]))
"""


def test_an_engine_that_is_killed_at_any_moment_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    """The control acknowledges before it records."""
    command = [sys.executable, "-c", PIPED, str(tmp_path), str(PIPED_KILLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=child_environment())
    (_, wrong_of_control), (counts, wrong) = json.loads(done.stdout)
    assert wrong_of_control
    assert not wrong
    assert counts["kills"] == PIPED_KILLS
    assert counts["tokens"] > PIPED_KILLS
    for name in ("fork", "rewind", "close", "asked again", "came back", "from a file"):
        assert counts[name], f"{name}: none"


@further_test
def test_a_server_that_tells_before_it_records_is_caught(tmp_path: Path, nursery: Nursery) -> None:
    """The control: so many kills are enough to notice."""
    _, wrong, _ = kill_often(tmp_path / "state", "process", kills=20, agents=3, seed=2, is_early=True, nursery=nursery)
    assert wrong
