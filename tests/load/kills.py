"""Agents that talk on while their server is killed: what they receive is held against the law, token for token."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from inference_engine.config import child_environment
from inference_engine.kv.strategies.full import Full
from kakeya import TLS, Client, DeadlineExceeded, RetryPolicy, Session, SessionNotFound, TransportError
from tests.load.scripted import solo_of

ROOT = Path(__file__).parents[2]
SDK = ROOT / "sdks" / "typescript"
NODE = shutil.which("node") or ""
LAW = solo_of(Full())
PATIENCE_SECONDS = 600.0  # of any machine, however busy
AGENT = "agent"  # the name of its thread
NO_ANSWER = (TransportError, DeadlineExceeded)
MOST_TOKENS = 250  # of one session
NOTICED_SECONDS = 0.1  # a wait for an answer or a token that is kept
LONGEST_SECONDS = 0.5  # until a kill; most come sooner, when much is new
# A life in so many is long, so that sessions leave memory in it.
LONG_LIVES, LONG_SECONDS = 12, 2.0
# A session that is idle for so long leaves memory: long enough for a call that found it to begin on a busy machine.
IDLE_TTL_SECONDS = 0.6
# Shares of turns: before which an agent forks, before which it goes back, and before which it rests until its session
# may have left memory.
FORKING, REWINDING, RESTING = 0.3, 0.15, 0.05


class Nursery:
    """A process that has imported everything, and forks the lives of servers on one port, one at a time."""

    def __init__(self, idle_seconds: float = IDLE_TTL_SECONDS) -> None:
        with socket.socket() as free, socket.socket() as too:
            for one in (free, too):
                one.bind(("127.0.0.1", 0))
            self.target, self.metrics = (f"127.0.0.1:{one.getsockname()[1]}" for one in (free, too))
        self._life = 0
        program = str(Path(__file__).with_name("serve_lives.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, self.target, self.metrics, str(idle_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(PYTHONPATH=f"{ROOT}:{ROOT / 'sdks/python/src'}", OMP_WAIT_POLICY="PASSIVE"),
            cwd=ROOT,
        )

    def begin(
        self,
        folder: Path | str,
        durability: str,
        *,
        is_early: bool,
        is_unproved: bool = False,
        replica: str = "server",
        lease_seconds: float = 5.0,
    ) -> None:
        """Returns once a life can be reached. is_early: it is the control. Fails for a life that ends before that.

        replica, lease_seconds: of a server on a database. is_unproved: the control that does not ask for its lease.
        """
        assert self._process.stdin is not None
        line = json.dumps([str(folder), durability, is_early, is_unproved, replica, lease_seconds])
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        life = self._line()
        assert life, "the process that forks lives has ended"
        self._life = int(life)
        if (said := self._line()) != "ready":
            self._life = 0  # this line was that of its end
            raise AssertionError(f"a life has not begun: it {said or 'is gone with the process that forks lives'}")

    def end_life(self, by: signal.Signals) -> int:
        """The status of the life, once the signal has ended it. 0: it ended in order, or there is none that began."""
        if not self._life:
            return 0
        with contextlib.suppress(ProcessLookupError):  # it ended by itself, and its status says how
            os.kill(self._life, by)
        self._life = 0
        word, status = self._line().split()
        assert word == "ended"
        return int(status)

    def signal(self, number: signal.Signals) -> None:
        """To the life, which goes on afterwards."""
        assert self._life
        os.kill(self._life, number)

    def end(self) -> None:
        self.end_life(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait(30)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Lives:
    """A server on one folder, started again as often as a test asks."""

    def __init__(self, nursery: Nursery, folder: Path | str, durability: str, *, is_early: bool = False) -> None:
        self.target = nursery.target
        self._nursery = nursery
        self._begin = partial(nursery.begin, folder, durability, is_early=is_early)

    def begin(self) -> None:
        """Returns once it can be reached."""
        self._begin()

    def kill(self) -> None:
        status = self._nursery.end_life(signal.SIGKILL)
        assert status == signal.SIGKILL, f"a life ended with status {status}"

    def stop(self) -> None:
        """End the life in order."""
        status = self._nursery.end_life(signal.SIGTERM)
        assert status == 0, f"a life ended with status {status}"


class Agents:
    """Threads that talk until they are stopped. wrong: what was not as it has to be.

    gave_up: agents that had no answer for as long as their patience lasts, while the server was killed again and again.
    Nothing that they received was wrong. waits: for an append's answer or a token, from and to when (`time.time`), if
    longer than NOTICED_SECONDS.
    """

    def __init__(
        self,
        target: str,
        count: int,
        seed: int,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        tls: TLS | Literal[False] = False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gave_up: list[str] = []
        self.waits: list[tuple[float, float]] = []
        self._target = target
        self._tls = tls
        self._retry = RetryPolicy(first_delay_seconds=0.02, max_delay_seconds=0.1, patience_seconds=patience_seconds)
        self._is_over = threading.Event()
        self._clients: list[Client] = []
        self._threads = [
            threading.Thread(name=AGENT, target=self._run, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float) -> None:
        """Let each end the session that it is at."""
        self._is_over.set()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self.wrong.append("an agent hangs")

    def leave(self) -> None:
        """End each where it is: there may be no server that could answer it."""
        self._is_over.set()
        for client in tuple(self._clients):
            client.close()
        for thread in self._threads:
            thread.join(30)

    def _run(self, rng: random.Random) -> None:
        try:
            with Client(self._target, tls=self._tls, retry=self._retry, timeout=2 * PATIENCE_SECONDS) as client:
                self._clients.append(client)
                while not self._is_over.is_set():
                    self._talk(client, rng)
        except NO_ANSWER as error:
            # Once no life is killed any more, each has to be answered.
            (self.wrong if self._is_over.is_set() else self.gave_up).append(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test is for
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _talk(self, client: Client, rng: random.Random) -> None:
        """A session and a fork of it, by turns, from its creation to their end. One rests meanwhile, and may leave
        memory."""
        session = client.create_session()
        self.counts["sessions"] += 1
        talks: list[tuple[Session, list[int]]] = [(session, [])]
        while talks:
            session, history = rng.choice(talks)
            if len(history) >= MOST_TOKENS or self._is_over.is_set():
                self._end(client, session, history)
                talks.remove((session, history))
                continue
            if history and len(talks) == 1 and rng.random() < FORKING:
                fork = session.fork()
                assert fork.history_length == len(history), f"a fork of {len(history)} has {fork.history_length}"
                talks.append((fork, list(history)))
                self.counts["fork"] += 1
            if rng.random() < RESTING:
                self._rest(client, session, history)
            if history and rng.random() < REWINDING:
                talks.remove((session, history))
                at = rng.randrange(len(history) + 1)
                session, history = session.rewind(at), history[:at]
                assert session.history_length == at, f"a session rewound to {at} has {session.history_length}"
                talks.append((session, history))
                self.counts["rewind"] += 1
            self._turn(session, history, rng)

    def _turn(self, session: Session, history: list[int], rng: random.Random) -> None:
        ids = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        began = time.time()
        length = session.append(ids)
        began = self._waited(began)
        history += ids
        assert length == len(history), f"an append is answered with {length}, and {len(history)} were appended"
        first, most, is_drawn = len(history), rng.randrange(1, 40), rng.random() < 0.5
        stream = session.generate(most, temperature=1.0 if is_drawn else None)
        received = []
        for token in stream:
            received.append(token)
            began = self._waited(began)
        done = stream.result()
        history += received
        found = (len(received), done.history_length)
        assert found == (most, len(history)), (found, most)
        LAW.check(history, first, done.seed if is_drawn else None)
        self.counts["tokens"] += len(received)

    def _waited(self, began: float) -> float:
        if (now := time.time()) - began > NOTICED_SECONDS:
            self.waits.append((began, now))
        return now

    def _rest(self, client: Client, session: Session, history: list[int]) -> None:
        """Long enough to leave memory; then the history comes back as it was."""
        time.sleep(1.5 * IDLE_TTL_SECONDS)
        listed = {one.id: one for one in client.sessions()}
        assert listed[session.id].history_length == len(history), listed[session.id]
        self.counts["came back"] += not listed[session.id].is_resident
        found = [token for piece in session.history() for token in piece.token_ids]
        assert found == history, f"a history of {len(history)} has come back as another one of {len(found)}"

    def _end(self, client: Client, session: Session, history: list[int]) -> None:
        assert session.info().history_length == len(history)
        assert session.close() == len(history)
        try:
            client.session(session.id)
        except SessionNotFound:
            self.counts["close"] += 1
        else:
            raise AssertionError("a session that was closed is there")


class NodeAgents:
    """The same, of the TypeScript SDK, in a process of Node.js. Built by `npm ci` and `npm run build` in its folder."""

    def __init__(
        self,
        target: str,
        count: int,
        seed: int,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        ca: Path | None = None,
    ) -> None:
        """ca: of the server's certificate; None: no TLS."""
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gave_up: list[str] = []
        self.waits: list[tuple[float, float]] = []
        self._histories: dict[str, list[int]] = {}  # by session
        self._is_over = False
        assert has_node_agents(), f"{SDK} is not built: npm ci && npm run build there, with Node.js 20 or newer"
        command = [NODE, str(Path(__file__).with_name("agents.mjs")), target, str(count), str(seed)]
        command += map(str, (patience_seconds, 1.5 * IDLE_TTL_SECONDS, NOTICED_SECONDS, *([ca] if ca else [])))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        self._reader = threading.Thread(name=AGENT, target=self._read, daemon=True)
        self._reader.start()

    def finish(self, seconds: float) -> None:
        """Let each end the session that it is at."""
        self._is_over = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._reader.join(seconds)
        if self._reader.is_alive():
            self.wrong.append("an agent hangs")
            self._process.kill()
        status = self._process.wait(30)
        self._reader.join()
        self._process.stdout.close()
        if status:
            self.wrong.append(f"the agents ended with status {status}")

    def leave(self) -> None:
        """End all where they are: there may be no server that could answer them."""
        self._process.kill()
        self.finish(30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            agent = line["agent"]
            try:
                self._learn(agent, line)
            except AssertionError as error:
                self.wrong.append(f"agent {agent} of Node.js: {error}")
        if not self._is_over and not self.gave_up:
            self.wrong.append("the agents ended by themselves")

    def _learn(self, agent: int, line: dict[str, Any]) -> None:
        assert "wrong" not in line, line["wrong"]
        if "unanswered" in line:
            assert not self._is_over, line["unanswered"]
            self.gave_up.append(f"agent {agent} of Node.js: {line['unanswered']}")
            return
        session = line["session"]
        if "created" in line:
            self._histories[session] = []
            self.counts["sessions"] += 1
            return
        if "forked" in line:
            self._histories[line["forked"]] = list(self._histories[session])
            self.counts["fork"] += 1
        if "rewound" in line:
            self._histories[line["rewound"]] = self._histories.pop(session)[: line["position"]]
            self.counts["rewind"] += 1
            session = line["rewound"]
        history = self._histories[session]
        self.waits += [(began, ended) for began, ended in line.get("waits", ())]
        if "received" in line:
            first, received = len(history), line["received"]
            history += received
            assert len(received) == line["most"], f"{len(received)} tokens of {line['most']}"
            LAW.check(history, first, None if line["seed"] is None else int(line["seed"]))
            self.counts["tokens"] += len(received)
        history += line.get("appended", ())
        if "history" in line:
            assert line["history"] == history, f"a history of {len(history)} has come back as {line['history']}"
            self.counts["came back"] += not line["resident"]
        length = line.get("closed", line.get("length"))
        assert length == len(history), f"the server says {length}, and the history has {len(history)}"
        if "closed" in line:
            assert line["gone"], "a session that was closed is there"
            del self._histories[session]
            self.counts["close"] += 1


def has_node_agents() -> bool:
    return bool(NODE) and (SDK / "dist" / "index.js").exists()


@contextmanager
def nurseries(idle_seconds: float = IDLE_TTL_SECONDS) -> Iterator[Nursery]:
    nursery = Nursery(idle_seconds)
    try:
        yield nursery
    finally:
        nursery.end()


@contextmanager
def lives(nursery: Nursery, folder: Path | str, durability: str, *, is_early: bool = False) -> Iterator[Lives]:
    server = Lives(nursery, folder, durability, is_early=is_early)
    try:
        yield server
        server.stop()
    finally:
        nursery.end_life(signal.SIGKILL)  # one that a test left


def kill_often(
    folder: Path | str,
    durability: str,
    *,
    kills: int,
    agents: int,
    seed: int,
    is_early: bool = False,
    of: Callable[..., Agents | NodeAgents] = Agents,
    is_over: Callable[[], bool] = lambda: False,
    patience_seconds: float = PATIENCE_SECONDS,
    nursery: Nursery | None = None,
) -> tuple[Counter[str], list[str], list[str]]:
    """Kill a server so many times, at random moments, under agents. What they did, what was wrong, agents that gave up.

    folder: of its sessions; or the DSN of their database.
    is_over: asked before each kill; True ends it early. nursery: of the lives; None: one of its own.
    """
    rng = random.Random(seed)
    with (
        nurseries() if nursery is None else nullcontext(nursery) as place,
        lives(place, folder, durability, is_early=is_early) as server,
    ):
        server.begin()
        talking = of(server.target, agents, seed, patience_seconds=patience_seconds)
        try:
            # A client that never reached its server has little patience.
            until = time.monotonic() + PATIENCE_SECONDS
            while talking.counts["sessions"] < agents and not talking.wrong:
                assert time.monotonic() < until, "an agent has no session"
                time.sleep(0.01)
            for number in range(kills):
                if talking.wrong or talking.gave_up or is_over():
                    break
                is_long = number % LONG_LIVES == LONG_LIVES // 2
                time.sleep(LONG_SECONDS if is_long else 0.02 + (LONGEST_SECONDS - 0.02) * rng.random() ** 2)
                server.kill()
                server.begin()
                talking.counts["kills"] += 1
        except BaseException:
            talking.leave()
            raise
        found = list(talking.wrong)
        talking.finish(1.0 if found else PATIENCE_SECONDS)  # others may wait for what is not there any more
        return talking.counts, found or talking.wrong, talking.gave_up
