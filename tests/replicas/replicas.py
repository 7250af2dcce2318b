"""Servers that share a database behind a front: killed, frozen, stopped, or without their database, under agents.

kill       a server by SIGKILL at a random moment; it begins again a moment later
freeze     a server by SIGSTOP, for longer than its lease and the proxy's pings take; meanwhile a session of its own
           is taken over, and it is sent calls about that: what it says when it wakes has to be true then
roll       a server by SIGTERM; it begins again once it has drained
database   away, frozen, and killed, by turns
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from kakeya import TLS
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc as rpc
from tests.deploy.fronts import Upstream, front
from tests.load.kills import IDLE_TTL_SECONDS, PATIENCE_SECONDS, Agents, NodeAgents, Nursery, has_node_agents, nurseries
from tests.server.wire import Details
from tests.session.postgres_server import PostgresServer, postgres_server

SERVERS = 2
LEASE_SECONDS = 1.0
FOUND_SECONDS = 5.0  # by then a proxy has found that a server is frozen
LONGEST_SECONDS = 0.5
AGENTS = 6  # a third of them by Node.js, where that is built
TCP = "tcp"
UNPROVED = "it says what it knows without asking for its lease"
EARLY = "it answers before it records"
# What may be answered while a session goes to another server, beside what is true.
PASSING = ("SESSION_ELSEWHERE", "JOURNAL_AWAY")


class TCPFront:
    """Passes connections on to servers by turns, as a proxy of TCP does. Those of a server that does not answer are
    closed on the client's side alone: what it says when it wakes reaches no client of ours."""

    def __init__(self, targets: list[str]) -> None:
        self.target = ""
        self._targets = targets
        self.out: set[int] = set()
        self._turns = itertools.cycle(range(len(targets)))
        self._clients: dict[asyncio.StreamWriter, int] = {}
        self._open: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()
        assert self._has_begun.wait(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._begin())
        self._loop.run_forever()

    async def _begin(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._has_begun.set()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in itertools.islice(self._turns, len(self._targets)):
            if number in self.out:
                continue
            host, port = self._targets[number].split(":")
            try:
                there, to_there = await asyncio.open_connection(host, int(port))
            except OSError:
                continue
            self._clients[writer] = number
            self._open += (writer, to_there)
            await asyncio.gather(_copy(reader, to_there), _copy(there, writer))
            del self._clients[writer]
            return
        writer.close()

    def leave_out(self, number: int, *, is_out: bool) -> None:
        def act() -> None:
            if is_out:
                self.out.add(number)
                for writer in [one for one, of in self._clients.items() if of == number]:
                    writer.close()
            else:
                self.out.discard(number)

        self._loop.call_soon_threadsafe(act)

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in self._open:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def replicas(
    dsn: str,
    durability: str,
    *,
    control: str = "",
    lease_seconds: float = LEASE_SECONDS,
    idle_seconds: float = IDLE_TTL_SECONDS,
) -> Iterator[tuple[list[Nursery], Callable[[int], None]]]:
    """What the servers are forked from, and a function that begins the server of a number."""
    with ExitStack() as stack:
        made = [stack.enter_context(nurseries(idle_seconds)) for _ in range(SERVERS)]

        def begin(number: int) -> None:
            made[number].begin(
                dsn,
                durability,
                is_early=control == EARLY,
                is_unproved=control == UNPROVED,
                replica=f"server-{number}",
                lease_seconds=lease_seconds,
            )

        for number in range(SERVERS):
            begin(number)
        yield made, begin


@contextmanager
def before(name: str, made: Sequence[Nursery]) -> Iterator[tuple[str, Path | None, Callable[[int, bool], None]]]:
    """A front's address, its authority (None: no TLS), and what leaves out a server that is frozen, or not any more,
    where the front does not look."""
    with ExitStack() as stack:
        if name == TCP:
            opened = TCPFront([one.target for one in made])
            stack.callback(opened.end)
            yield opened.target, None, lambda number, is_out: opened.leave_out(number, is_out=is_out)
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [Upstream(one.target, one.metrics) for one in made]
        proxy = stack.enter_context(front(name, folder, *servers, one_journal=True))
        yield proxy.target, proxy.ca, lambda _number, _is_out: None


class Disturbed:
    """Servers under agents of both SDKs. moments: when which disturbance began (`time.time`)."""

    def __init__(
        self,
        how: str,
        name: str,
        database: PostgresServer,
        durability: str,
        stack: ExitStack,
        *,
        agents: int,
        seed: int,
        control: str,
        lease_seconds: float,
        away_seconds: float,
    ) -> None:
        self._rng = random.Random(f"{how} {name} {seed}")
        self._database, self._away_seconds = database, away_seconds
        self._frozen_seconds = lease_seconds + FOUND_SECONDS
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.moments: list[float] = []
        # Where the database is by turns.
        self._places = [database.folder, database.folder.with_name(f"{database.folder.name}-2")]
        dsn = database.database()
        if how == "promote":
            hosts = ",".join(map(str, self._places))
            dsn = dsn.replace(str(database.folder), hosts) + " target_session_attrs=read-write connect_timeout=2"
            stack.callback(self._end_databases)
        # What a server that wakes is asked about has to be in its memory still: then it could say what is not true.
        idle_seconds = 10 * self._frozen_seconds if how == "freeze" else IDLE_TTL_SECONDS
        begun = replicas(dsn, durability, control=control, lease_seconds=lease_seconds, idle_seconds=idle_seconds)
        self._made, self._begin = stack.enter_context(begun)
        target, ca, self._tell = stack.enter_context(before(name, self._made))
        by_node = agents // 3 if has_node_agents() else 0
        tls = TLS(root_certificates=ca) if ca else None
        self.talking: list[Agents | NodeAgents] = [Agents(target, agents - by_node, seed, tls=tls or False)]
        if by_node:
            self.talking.append(NodeAgents(target, by_node, seed, ca=ca))
        self._by_how = {
            "kill": self._kill,
            "freeze": self._freeze,
            "roll": self._roll,
            "database": self._fail,
            "promote": self._promote,
        }[how]
        self._agents = agents

    def wait_for_sessions(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while sum(one.counts["sessions"] for one in self.talking) < self._agents and not self.is_wrong:
            assert time.monotonic() < until, "an agent has no session"
            time.sleep(0.01)

    @property
    def is_caught(self) -> bool:
        return bool(self.wrong or any(one.wrong for one in self.talking))

    @property
    def is_wrong(self) -> bool:
        return self.is_caught or any(one.gave_up for one in self.talking)

    def disturb(self) -> None:
        """Once."""
        time.sleep(0.05 + LONGEST_SECONDS * self._rng.random())
        self._by_how(self._rng.randrange(SERVERS))
        self.counts["disturbances"] += 1
        if self._by_how != self._kill:  # several at once are kills' alone: else a wait would be for more than one
            before, until = self._tokens(), time.monotonic() + PATIENCE_SECONDS
            while any(now <= then for now, then in zip(self._tokens(), before, strict=True)) and not self.is_wrong:
                assert time.monotonic() < until, "agents do not go on"
                time.sleep(0.01)

    def _tokens(self) -> list[int]:
        return [one.counts["tokens"] for one in self.talking]

    def _kill(self, which: int) -> None:
        self.moments.append(time.time())
        self._end_life(which, signal.SIGKILL, signal.SIGKILL)
        time.sleep(LONGEST_SECONDS * self._rng.random())  # meanwhile the other one has its sessions
        self._begin(which)

    def _roll(self, which: int) -> None:
        self.moments.append(time.time())
        self._end_life(which, signal.SIGTERM, 0)
        self._begin(which)

    def _end_life(self, which: int, by: signal.Signals, expected: int) -> None:
        if (status := self._made[which].end_life(by)) != expected:
            self.wrong.append(f"server {which} ended by itself, with status {status}")

    def _fail(self, _which: int) -> None:
        self.moments.append(time.time())
        kind = self.counts["disturbances"] % 3
        if kind == 1:
            with self._database.frozen():
                time.sleep(self._away_seconds)
            return
        self._database.stop(signal.SIGQUIT)
        if kind == 0:
            time.sleep(self._away_seconds)
        self._database.start()

    def _promote(self, _which: int) -> None:
        self._places.reverse()
        shutil.rmtree(self._places[0], ignore_errors=True)
        with self._database.standby(self._places[0]) as standby:
            time.sleep(LONGEST_SECONDS * self._rng.random())
            self.moments.append(time.time())
            self._database.stop(signal.SIGQUIT)
            standby.promote()
        self._database = standby

    def _end_databases(self) -> None:
        self._database.stop(signal.SIGQUIT)
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)

    def _freeze(self, which: int) -> None:
        with ExitStack() as stack:
            here, there = (
                rpc.RuntimeServiceStub(stack.enter_context(grpc.insecure_channel(self._made[one].target)))
                for one in (which, 1 - which)
            )
            session = _answered(here.CreateSession, pb.CreateSessionRequest()).session_id
            _answered(here.AppendTokens, pb.AppendTokensRequest(session_id=session, token_ids=[1, 2, 3]))
            self.moments.append(time.time())
            self._made[which].signal(signal.SIGSTOP)
            stack.callback(self._made[which].signal, signal.SIGCONT)
            ends = time.monotonic() + self._frozen_seconds
            time.sleep(0.2)
            self._tell(which, True)
            stack.callback(self._tell, which, False)
            # Sent to the one that is stopped; answered when it wakes.
            look = pb.GetSessionInfoRequest(session_id=session)
            asked: list[Any] = [here.GetSessionInfo.future(look, timeout=PATIENCE_SECONDS) for _ in range(3)]
            more = pb.AppendTokensRequest(session_id=session, token_ids=[9], expected_history_length=3)
            asked.append(here.AppendTokens.future(more, timeout=PATIENCE_SECONDS))
            taken = pb.AppendTokensRequest(session_id=session, token_ids=[4] * 7, request_id=b"taken".ljust(16))
            _answered(there.AppendTokens, taken)
            time.sleep(max(0.0, ends - time.monotonic()))
            self._made[which].signal(signal.SIGCONT)
            self.wrong += [f"a server that woke {said}" for said in map(_stale, asked) if said]
            _answered(there.CloseSession, pb.CloseSessionRequest(session_id=session))

    def finish(self) -> None:
        is_wrong = self.is_wrong  # then others may wait for what is not there any more
        for one in self.talking:
            one.finish(1.0 if is_wrong else PATIENCE_SECONDS)

    def leave(self) -> None:
        for one in self.talking:
            one.leave()

    def gaps(self) -> list[float]:
        """Seconds for which an agent waited while a disturbance began."""
        waits = [wait for one in self.talking for wait in one.waits]
        return [ended - began for at in self.moments for began, ended in waits if began <= at <= ended]


def _answered(call: Callable[..., Any], request: Any) -> Any:
    """As an SDK: again, until the session is there."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call(request, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            refusal: Any = error
            if Details(refusal).reason.rpartition(" ")[2] not in PASSING or time.monotonic() > until:
                raise
            time.sleep(0.03)


def _stale(call: Any) -> str:
    """What an answer says of a history of 3 that has 10 by now; "": what is true, or that another server has it."""
    try:
        length = call.result().history_length
    except grpc.RpcError as error:
        refusal: Any = error
        details = Details(refusal)
        if details.reason.rpartition(" ")[2] in PASSING:
            return ""
        length = int(details.error_info.metadata["actual"]) if details.error_info else -1
    return "" if length == 10 else f"said {length} of a history of 10"


def disturb(
    how: str,
    name: str,
    *,
    count: int,
    seed: int,
    durability: str = "process",
    agents: int = AGENTS,
    control: str = "",
    lease_seconds: float = LEASE_SECONDS,
    away_seconds: float = 10.0,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Counter[str], list[str], list[str], list[float]]:
    """Disturb servers behind a front so many times, in one of HOWS. What agents did, what was wrong, which gave up, and
    the seconds of their waits over it. control: UNPROVED or EARLY, a server that has to be caught.

    name: of a proxy of `deploy`, or TCP. is_over: asked before each; True ends it early.
    """
    with ExitStack() as stack:
        database = stack.enter_context(postgres_server(is_synced=durability == "power"))
        settings: dict[str, Any] = {"agents": agents, "seed": seed, "control": control, "lease_seconds": lease_seconds}
        servers = Disturbed(how, name, database, durability, stack, **settings, away_seconds=away_seconds)
        try:
            servers.wait_for_sessions()
            for _ in range(count):
                if (servers.is_caught if control else servers.is_wrong) or is_over():
                    break
                servers.disturb()
        except BaseException:
            servers.leave()
            raise
        servers.finish()
    counts = sum((one.counts for one in servers.talking), servers.counts)
    wrong = servers.wrong + [one for talking in servers.talking for one in talking.wrong]
    gave_up = [one for talking in servers.talking for one in talking.gave_up]
    return counts, wrong, gave_up, servers.gaps()
