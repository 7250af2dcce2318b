"""Servers that share a database behind the proxies of `deploy`: agents of both SDKs talk on while they are killed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kakeya import TLS
from tests.deploy.fronts import Front, Upstream, front
from tests.further import further_test
from tests.kept import Database
from tests.load.kills import PATIENCE_SECONDS, Agents, NodeAgents, has_node_agents
from tests.replicas.replicas import LONGEST_SECONDS, replicas

KILLS, AGENTS = 8, 3


def by_python(opened: Front, *arguments: Any) -> Agents | NodeAgents:
    return Agents(opened.target, *arguments, tls=TLS(root_certificates=opened.ca))


def by_typescript(opened: Front, *arguments: Any) -> Agents | NodeAgents:
    if not has_node_agents():
        pytest.skip("the TypeScript SDK is not built: npm ci && npm run build in sdks/typescript")
    return NodeAgents(opened.target, *arguments, ca=opened.ca)


@further_test
@pytest.mark.parametrize("name", ["envoy", "nginx"])  # HAProxy asks for health at a port that these servers lack
@pytest.mark.parametrize("talk", [by_python, by_typescript])
def test_agents_behind_a_proxy_notice_pauses_alone(
    name: str, talk: Callable[..., Agents | NodeAgents], database: Database, tmp_path: Path
) -> None:
    rng = random.Random(f"{name} {talk.__name__}")
    with replicas(database.dsn, "process") as (_, made, begin):
        servers = [Upstream(each.target) for each in made]
        with front(name, tmp_path, *servers, one_journal=True) as opened:
            talking = talk(opened, AGENTS, rng.randrange(1000))
            try:
                until = time.monotonic() + PATIENCE_SECONDS
                while talking.counts["sessions"] < AGENTS and not talking.wrong:
                    assert time.monotonic() < until, "an agent has no session"
                    time.sleep(0.01)
                for number in range(KILLS):
                    time.sleep(0.05 + LONGEST_SECONDS * rng.random())
                    made[number % 2].end_life(signal.SIGKILL)
                    time.sleep(LONGEST_SECONDS * rng.random())  # meanwhile the other one has its sessions
                    begin(number % 2)
            except BaseException:
                talking.leave()
                raise
            talking.finish(1.0 if talking.wrong else PATIENCE_SECONDS)
    assert (talking.wrong, talking.gave_up) == ([], [])
    assert talking.counts["tokens"] > 0
