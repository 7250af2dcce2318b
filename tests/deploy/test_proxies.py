"""Sessions through Envoy, HAProxy and nginx, set up by the files of `deploy/proxies`: TLS, routes, time-outs, drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_engine.kv.strategies.full import Full
from kakeya import TLS, AsyncClient, AsyncSession, Client, RetryPolicy
from kakeya.v1 import runtime_pb2 as pb
from tests.deploy.fronts import FRONTS, Envoy, Front, Upstream, free_port, front
from tests.deploy.test_files import COMPOSE, load
from tests.further import further_test
from tests.load.kills import ROOT, Agents, NodeAgents, Nursery, has_node_agents, kill_often, nurseries
from tests.load.scripted import solo_of
from tests.processes import Process, ending, started
from tests.server.wire import HISTORY, TIMEOUT_SECONDS, read_rest, refused
from tests.server.wire import Client as Wire

PROGRAM = ROOT / "tests" / "server" / "serve_scripted.py"
LAW = solo_of(Full())
KILLS = 4
SESSIONS = 12
TOKENS = 600
PATIENCE = RetryPolicy(first_delay_seconds=0.02, max_delay_seconds=0.1, patience_seconds=TIMEOUT_SECONDS)

Server = tuple[Process, Upstream]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nurseries() as made:
        yield made


@pytest.fixture(params=[Agents, NodeAgents], ids=["python", "typescript"])
def talking_by(request: pytest.FixtureRequest) -> Callable[..., Agents | NodeAgents]:
    """Agents of an SDK that talk through a front."""
    if request.param is NodeAgents and not has_node_agents():
        pytest.skip("the TypeScript SDK is not built: npm ci && npm run build in sdks/typescript")

    def talking_by(opened: Front, *arguments: Any, **options: Any) -> Agents | NodeAgents:
        if request.param is NodeAgents:
            return NodeAgents(opened.target, *arguments, ca=opened.ca, **options)
        return Agents(opened.target, *arguments, tls=TLS(root_certificates=opened.ca), **options)

    return talking_by


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts a server on the scripted model, by its seconds of drain and of a step. It is gone after the test."""
    with ExitStack() as stack:

        def start(drain_seconds: float = 0.0, step_seconds: float = 0.002) -> Server:
            metrics = f"127.0.0.1:{free_port()}"
            arguments = (str(PROGRAM), "127.0.0.1:0", str(drain_seconds), str(step_seconds), metrics)
            child = stack.enter_context(ending(started(*arguments)))
            assert child.stdout is not None
            return child, Upstream(child.stdout.readline().strip(), metrics)

        yield start


@asynccontextmanager
async def through(opened: Front) -> AsyncIterator[Wire]:
    """Calls by the wire's own stub, which asks for nothing that the SDKs ask for."""
    async with grpc.aio.secure_channel(opened.target, opened.authority.credentials()) as channel:
        yield Wire(channel)


def sdk(opened: Front) -> Client:
    return Client(opened.target, tls=TLS(root_certificates=opened.ca), retry=PATIENCE)


def asdk(opened: Front, retry: RetryPolicy = PATIENCE) -> AsyncClient:
    return AsyncClient(opened.target, tls=TLS(root_certificates=opened.ca), retry=retry)


@pytest.mark.parametrize("name", FRONTS)
def test_the_tracked_files_are_what_the_proxy_takes(name: str, tmp_path: Path) -> None:
    for one_journal in (False, True):
        opened = FRONTS[name](tmp_path, (Upstream("127.0.0.1:1"), Upstream("127.0.0.1:2")), one_journal=one_journal)
        opened.write()
        done = subprocess.run(opened.check(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "warn" not in done.stderr.lower()


@further_test
@pytest.mark.parametrize("name", FRONTS)
def test_agents_notice_nothing_of_kills_behind_a_proxy(
    name: str, tmp_path: Path, nursery: Nursery, talking_by: Callable[..., Agents | NodeAgents]
) -> None:
    with front(name, tmp_path, Upstream(nursery.target)) as opened:

        def through_it(_target: str, *arguments: Any, **options: Any) -> Agents | NodeAgents:
            return talking_by(opened, *arguments, **options)

        counts, wrong, gave_up = kill_often(
            tmp_path / "state", "process", kills=KILLS, agents=2, seed=5, of=through_it, nursery=nursery
        )
    assert (wrong, gave_up) == ([], [])
    assert counts["kills"] == KILLS
    assert counts["tokens"] > 0


@further_test
@pytest.mark.parametrize("name", FRONTS)
def test_each_session_stays_on_its_server_and_there_are_some_on_both(
    name: str, tmp_path: Path, start: Callable[..., Server]
) -> None:
    servers = [start()[1] for _ in range(2)]
    with front(name, tmp_path, *servers) as opened, sdk(opened) as client:
        sessions = [client.create_session() for _ in range(SESSIONS)]
        for session in sessions:
            session.append(HISTORY)
            fork = session.fork()
            for each in (session, fork):
                received = list(each.generate(8))
                LAW.check([*HISTORY, *received], len(HISTORY), None)
        found = []
        for server in servers:
            with Client(server.target) as alone:
                found.append(len(list(alone.sessions())))
    assert sum(found) == 2 * SESSIONS
    assert min(found) > 0


# Shorter than the silence of the server below, in place of what the files have. Envoy has none: its default is 15 s.
SHORT: dict[str, dict[str, str]] = {
    "envoy": {},
    "haproxy": {"timeout client 1h": "timeout client 2s", "timeout server 1h": "timeout server 2s"},
    "nginx": {"grpc_read_timeout 60s": "grpc_read_timeout 2s"},
}
SILENCE_SECONDS = {"envoy": 16.0, "haproxy": 5.0, "nginx": 5.0}
HEARTBEAT_SECONDS = 1.0


@further_test
@pytest.mark.parametrize("name", FRONTS)
async def test_a_generate_that_waits_is_not_cut(name: str, tmp_path: Path, start: Callable[..., Server]) -> None:
    """And pings of the proxy, more of them than gRPC forgives, do not end its connection."""
    _, target = await asyncio.to_thread(start, 0.0, SILENCE_SECONDS[name])
    with front(name, tmp_path, target, changes=SHORT[name]) as opened:
        async with through(opened) as client:
            request = pb.GenerateRequest(session_id=await client.open(), max_tokens=1)
            if name != "envoy":  # the control: time-outs are what they are said to be
                assert (await refused(read_rest(client.stream(request)))).code in CUT
                request = pb.GenerateRequest(session_id=await client.open(), max_tokens=1)
                request.heartbeat_seconds = HEARTBEAT_SECONDS
            frames = await read_rest(client.stream(request))
    assert frames[-1].HasField("done")


# What gRPC makes of a proxy's 504, or of a stream that it ends.
CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


@further_test
@pytest.mark.parametrize("name", FRONTS)
async def test_a_server_that_stops_takes_nothing_new_and_ends_what_runs(
    name: str, tmp_path: Path, start: Callable[..., Server]
) -> None:
    (leaving, its_target), (_, other) = [await asyncio.to_thread(start, 60.0) for _ in range(2)]
    with front(name, tmp_path, its_target, other, one_journal=True) as opened:
        async with asdk(opened) as agent:
            session = await session_on(its_target, agent)
            await session.append(HISTORY)
            stream = aiter(session.generate(TOKENS))
            received = [await anext(stream)]
            leaving.send_signal(signal.SIGTERM)
            await until_it_refuses(its_target)
            created = [await agent.create_session() for _ in range(SESSIONS)]
            received += [token async for token in stream]
            LAW.check([*HISTORY, *received], len(HISTORY), None)
            assert await asyncio.to_thread(leaving.wait, TIMEOUT_SECONDS) == 0
            for each in [*created, *[await agent.create_session() for _ in range(SESSIONS)]]:
                await each.append(HISTORY)


async def until_it_refuses(server: Upstream) -> None:
    """What it takes between the signal and that ends with it."""
    async with grpc.aio.insecure_channel(server.target) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while True:
                await Wire(channel).call("CreateSession", pb.CreateSessionRequest())
                await asyncio.sleep(0.01)


async def session_on(server: Upstream, agent: AsyncClient) -> AsyncSession:
    """One that `server` has, of those that the agent creates through a front."""
    async with AsyncClient(server.target) as alone:
        for _ in range(100):
            session = await agent.create_session()
            if session.id in {each.id async for each in alone.sessions()}:
                return session
    raise AssertionError("none of 100 sessions came to this server")


@further_test
def test_envoy_of_compose_with_a_database_sends_what_a_dead_server_had_to_the_other(
    tmp_path: Path, start: Callable[..., Server]
) -> None:
    (dead, first), (_, second) = [start() for _ in range(2)]
    opened = Envoy(tmp_path, (first, second))
    opened.arguments = load(COMPOSE / "postgres.yaml")["services"]["envoy"]["command"][2:]
    try:
        opened.start()
        dead.kill()
        with sdk(opened) as client:
            for _ in range(SESSIONS):
                assert client.create_session().append(HISTORY) == len(HISTORY)
    finally:
        opened.stop()


@further_test
@pytest.mark.parametrize("name", ["envoy", "haproxy"])
async def test_a_server_that_is_frozen_is_found_and_its_streams_go_on(
    name: str, tmp_path: Path, start: Callable[..., Server]
) -> None:
    """Envoy by its pings, HAProxy by its checks of health; nginx has neither."""
    frozen, target = await asyncio.to_thread(start)
    with front(name, tmp_path, target, one_journal=True) as opened:
        async with asdk(opened) as agent:
            session = await agent.create_session()
            await session.append(HISTORY)
            stream = aiter(session.generate(TOKENS))
            received = [await anext(stream)]
            frozen.send_signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(opened.until_down)
            finally:
                frozen.send_signal(signal.SIGCONT)
            received += [token async for token in stream]
    LAW.check([*HISTORY, *received], len(HISTORY), None)


@further_test
async def test_servers_are_exchanged_under_a_running_envoy_and_no_stream_ends(
    tmp_path: Path, start: Callable[..., Server]
) -> None:
    (_, first), (_, second) = [await asyncio.to_thread(start) for _ in range(2)]
    with front("envoy", tmp_path, first) as opened:
        assert isinstance(opened, Envoy)
        async with asdk(opened, RetryPolicy(attempts=1)) as strict, asdk(opened) as agent:
            session = await strict.create_session()
            await session.append(HISTORY)
            stream = aiter(session.generate(TOKENS))
            received = [await anext(stream)]
            opened.set_servers((second, second))
            await session_on(second, agent)
            received += [token async for token in stream]
    LAW.check([*HISTORY, *received], len(HISTORY), None)


@further_test
def test_a_renewed_certificate_is_shown_by_a_running_envoy(tmp_path: Path, start: Callable[..., Server]) -> None:
    with front("envoy", tmp_path, start()[1]) as opened:
        assert isinstance(opened, Envoy)
        before = opened.certificate()
        opened.authority.write_server_files(tmp_path)
        opened.set_certificate()
        until = time.monotonic() + TIMEOUT_SECONDS
        while opened.certificate() == before:
            assert time.monotonic() < until
            time.sleep(0.05)
