"""Kills of a server at random moments, in short; `make soak-kill` is the long form."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inference_engine.config import child_environment
from tests.load.kills import ROOT, Agents, NodeAgents, has_node_agents, kill_often, lives

KILLS, PIPED_KILLS = 10, 180


@pytest.fixture(params=[Agents, NodeAgents], ids=["python", "typescript"])
def of(request: pytest.FixtureRequest) -> type[Agents] | type[NodeAgents]:
    if request.param is NodeAgents and not has_node_agents():
        pytest.skip("the TypeScript SDK is not built: npm ci && npm run build in sdks/typescript")
    kind: type[Agents] | type[NodeAgents] = request.param
    return kind


def test_agents_notice_nothing_of_kills_but_a_pause(tmp_path: Path, of: type[Agents] | type[NodeAgents]) -> None:
    counts, wrong, gave_up = kill_often(tmp_path / "state", "process", kills=KILLS, agents=3, seed=1, of=of)
    assert (wrong, gave_up) == ([], [])
    assert counts["kills"] == KILLS
    assert counts["tokens"] > 0


@pytest.mark.parametrize("is_over", [False, True])
def test_agents_without_an_answer_gave_up_and_nothing_was_lost(
    tmp_path: Path, of: type[Agents] | type[NodeAgents], is_over: bool
) -> None:
    """A machine may be too busy for a life to answer anything. Once no server is killed, no answer is a fault."""
    with lives(tmp_path / "state", "process") as server:
        server.begin()
        agents = of(server.target, 2, 1, patience_seconds=2.0)
        waited_for(lambda: agents.counts["sessions"] >= 2)
        server.kill()
        if not is_over:
            waited_for(lambda: len(agents.gave_up) == 2)
        agents.finish(30.0)
        assert (len(agents.gave_up), len(agents.wrong)) == ((0, 2) if is_over else (2, 0))
        server.begin()


def waited_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# A process forks the lives of an engine, and must have no threads when it does: one of its own.
PIPED = """
import sys
from pathlib import Path
from tests.load.piped import kill_engines
early = sys.argv[3:] == ["early"]
counts, wrong, _ = kill_engines(Path(sys.argv[1]), "power", kills=int(sys.argv[2]), agents=6, seed=1, is_early=early)
print(counts["kills"], counts["tokens"], counts["from a file"], len(wrong), *wrong)
"""


def piped(state: Path, kills: int, *words: str) -> list[int]:
    command = [sys.executable, "-c", PIPED, str(state), str(kills), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=child_environment())
    kills_, tokens, from_file, wrong = done.stdout.split()[:4]
    return [int(kills_), int(tokens), int(from_file), int(wrong)]


def test_an_engine_that_is_killed_at_any_moment_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    kills, tokens, from_file, wrong = piped(tmp_path / "state", PIPED_KILLS)
    assert wrong == 0
    assert kills == PIPED_KILLS
    assert tokens > PIPED_KILLS
    assert from_file, "no session's K/V came from a file"


def test_an_engine_that_acknowledges_before_it_records_is_caught(tmp_path: Path) -> None:
    """The control."""
    assert piped(tmp_path / "state", 20, "early")[3]


def test_a_server_that_tells_before_it_records_is_caught(tmp_path: Path) -> None:
    """The control: so many kills are enough to notice."""
    _, wrong, _ = kill_often(tmp_path / "state", "process", kills=20, agents=3, seed=2, is_early=True)
    assert wrong
