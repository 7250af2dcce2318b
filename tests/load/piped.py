"""Kills of an engine that acknowledges through a pipe: no network, no SDK, and many more kills a second.

    this process            knows what each agent received, and forks a life
    a life, forked          an engine on the folder; its agents go on with what they know, and tell of each call
                            before they make it, and of each answer once the engine says that it is saved
    SIGKILL, at any moment  also while the life opens the folder; what was written into the pipe by then counts

A call that was sent and not answered is made again in the next life, with its request id. The process that forks
must have no threads, and no engine of its own.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.kv.strategies.full import Full
from inference_engine.metrics import EngineMetrics
from inference_engine.session.sqlite_journal import SQLiteJournal
from inference_engine.types import Durability, Failed, Finished, GenerateParams, Sampling, TokenCommitted
from laboratory.scripted import Script
from tests.load.early import Early
from tests.load.scripted import scripted_engine, solo_of

MOST_TOKENS = 250  # of one session
LONGEST_SECONDS = 0.2  # until a kill; most come sooner, when much is new
PATIENT_KILLS = 25  # after as many without K/V from a file, lives become twice as long: the machine is busy
IDLE_SECONDS = 0.03  # between some calls, so that there are copies of K/V
LAW = solo_of(Full())
# Copies of K/V are written and read as often as can be.
FILES: dict[str, Any] = {"hibernate": "always", "hibernate_after_seconds": 0.0}


@dataclass
class Agent:
    """What an agent knows: its session, what it received, and the call that it waits for."""

    number: int
    session: str = ""
    history: list[int] = field(default_factory=list)
    call: dict[str, Any] | None = None
    received: list[int] = field(default_factory=list)  # of the Generate that it waits for

    @property
    def owner(self) -> str:
        return f"agent-{self.number}"

    @property
    def known(self) -> list[int]:
        return self.history + self.received

    def next_call(self, rng: random.Random) -> dict[str, Any]:
        request_id = rng.randbytes(16).hex()
        if not self.session:
            return {"kind": "create", "id": request_id}
        if len(self.history) >= MOST_TOKENS:
            return {"kind": "close", "id": request_id}
        if self.call is not None and self.call["kind"] == "append":
            return {"kind": "generate", "id": request_id, "most": rng.randrange(1, 40), "drawn": rng.random() < 0.5}
        return {"kind": "append", "id": request_id, "ids": [rng.randrange(256) for _ in range(rng.randrange(1, 30))]}

    def learn(self, line: dict[str, Any], counts: Counter[str]) -> None:
        """What a life has sent. Raises AssertionError if it cannot be."""
        if "wrong" in line:
            raise AssertionError(line["wrong"])
        if "call" in line:
            self.call, self.received = line["call"], []
            return
        assert self.call is not None
        kind = self.call["kind"]
        if "token" in line:
            assert line["position"] == len(self.known), f"position {line['position']} after {len(self.known)} tokens"
            self.received.append(line["token"])
            counts["tokens"] += 1
            return
        if kind == "create":
            self.session, self.history = line["session"], []
            counts["sessions"] += 1
        elif kind == "append":
            self.history += self.call["ids"]
        elif kind == "generate":
            first, received = len(self.history), self.received
            self.history, self.received = self.known, []
            assert len(received) == self.call["most"], f"{len(received)} tokens of {self.call['most']}"
            law = LAW.tokens(self.history[:-1], first, seed=line["seed"] if self.call["drawn"] else None)
            assert received == law, f"from {first}: {received}, and the law says {law}"
            counts["from a file"] += line["from_file"]
        assert line["length"] == len(self.history), f"{kind} is answered with {line['length']}, not {len(self.history)}"
        if kind == "close":
            self.session, self.history = "", []
        counts[kind] += 1


class Life:
    """An engine with its agents, in a process that will be killed."""

    def __init__(self, engine: Engine, agents: list[Agent], pipe: int, *, is_last: bool) -> None:
        self._engine, self._agents, self._pipe, self._is_last = engine, agents, pipe, is_last
        self._idle = {agent.session for agent in agents}  # they had no Generate in this life yet

    def run(self, seed: str) -> None:
        threads = [
            threading.Thread(target=self._talk, args=(agent, random.Random(f"{seed} {agent.number}")))
            for agent in self._agents
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _tell(self, agent: Agent, **line: Any) -> None:
        text = json.dumps({"agent": agent.number, **line}) + "\n"
        assert len(text) < select.PIPE_BUF, "a longer line could be torn by a kill"
        os.write(self._pipe, text.encode())
        agent.learn(line, Counter())

    def _saved(self) -> None:
        done = threading.Event()
        self._engine.when_saved(done.set)
        done.wait()

    def _talk(self, agent: Agent, rng: random.Random) -> None:
        try:
            self._check(agent)
            is_new = agent.call is None or self._answered(agent)
            while not (is_new and self._is_last):
                if is_new:
                    if rng.random() < 0.3:
                        time.sleep(IDLE_SECONDS)
                    self._tell(agent, call=agent.next_call(rng))
                self._make(agent)
                is_new = True
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test is for
            text = f"{agent.owner}: {type(error).__name__}: {error}"
            os.write(self._pipe, (json.dumps({"agent": agent.number, "wrong": text[:1000]}) + "\n").encode())

    @staticmethod
    def _answered(agent: Agent) -> bool:
        assert agent.call is not None
        return bool(agent.call.get("is_answered"))

    def _check(self, agent: Agent) -> None:
        """The history begins with what the agent knows, and has nothing behind it but what its call may have added."""
        if not agent.session:
            return
        call = agent.call or {"kind": ""}
        self._engine.recall(agent.session, owner=agent.owner)
        if call["kind"] == "close" and not self._engine.list_sessions(owner=agent.owner):
            return  # it was closed, and the answer lost
        ids = self._engine.read_history(agent.session, owner=agent.owner).token_ids.tolist()
        known, more = agent.known, ids[len(agent.known) :]
        assert ids[: len(known)] == known, f"{len(known)} tokens received; the history of {len(ids)} has others"
        is_waiting = not call.get("is_answered")
        if is_waiting and call["kind"] == "append":
            assert more in ([], call["ids"]), f"{len(more)} tokens more than received, of an append of {call['ids']}"
        else:
            most = call["most"] - len(agent.received) if is_waiting and call["kind"] == "generate" else 0
            assert len(more) <= most, f"{len(more)} tokens more than received, at most {most} were asked for"

    def _make(self, agent: Agent) -> None:
        engine, owner, session = self._engine, agent.owner, agent.session
        call = agent.call
        assert call is not None
        request_id = bytes.fromhex(call["id"])
        named: dict[str, Any] = {"owner": owner, "request_id": request_id}
        engine.recall(session, **named)
        if call["kind"] == "create":
            found = engine.create_session(**named).session_id
            self._saved()
            self._tell(agent, session=found, length=0)
        elif call["kind"] == "append":
            length = engine.append_once(session, call["ids"], wait_seconds=10.0, **named).tokens
            self._saved()
            self._tell(agent, length=length)
        elif call["kind"] == "generate":
            sampling = Sampling(temperature=1.0) if call["drawn"] else Sampling()
            params = GenerateParams(max_tokens=call["most"], sampling=sampling)
            known = len(agent.known) if agent.received else None  # before its first token it is the whole call again
            for event in engine.generate(session, params, resume_from=known, wait_seconds=10.0, **named):
                if isinstance(event, TokenCommitted):
                    self._tell(agent, token=event.token_id, position=event.position)
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Finished):
                    self._saved()
                    from_file = bool(event.cached_tokens) and session in self._idle
                    self._tell(agent, length=event.history_length, seed=event.seed, from_file=from_file)
            self._idle.discard(session)
        else:
            length = engine.close_once(session, **named).tokens
            self._saved()
            self._tell(agent, length=length)
        call["is_answered"] = True


class Lives:
    """Forks lives on one folder, and learns from each what its agents received."""

    def __init__(self, folder: Path, durability: str, agents: int, seed: int, *, is_early: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._folder, self._durability, self._is_early = folder, Durability(durability), is_early
        self._agents = [Agent(number) for number in range(agents)]
        self._seed, self._lives = seed, 0

    def live(self, seconds: float | None, *, is_from_fork: bool = False) -> None:
        """Kill a life so long after what it first sent, or after its fork; None: let it end what was begun."""
        self._lives += 1
        reader, writer = os.pipe()
        if (life := os.fork()) == 0:
            status = 1
            try:
                os.close(reader)
                self._run(writer, is_last=seconds is None)
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        try:
            self._listen(reader, life, seconds, is_from_fork=is_from_fork)
        finally:
            os.close(reader)
            _, status = os.waitpid(life, 0)
        if status not in (signal.SIGKILL, 0):
            self.wrong.append(f"a life ended by itself, with status {status}")

    def _run(self, pipe: int, *, is_last: bool) -> None:
        torch.set_num_threads(1)
        metrics = EngineMetrics()
        kind: Callable[..., SQLiteJournal] = Early if self._is_early else SQLiteJournal
        journal = kind(self._folder, self._durability, weights="scripted", metrics=metrics)
        with scripted_engine(journal=journal, metrics=metrics, script=Script(step_seconds=0.001), **FILES) as engine:
            Life(engine, self._agents, pipe, is_last=is_last).run(f"{self._seed} {self._lives}")

    def _listen(self, pipe: int, life: int, seconds: float | None, *, is_from_fork: bool) -> None:
        until = time.monotonic() + seconds if seconds is not None and is_from_fork else None
        rest, is_killed = b"", False
        while True:
            if until is not None and not is_killed:
                left = until - time.monotonic()
                if left <= 0 or not select.select([pipe], [], [], left)[0]:
                    os.kill(life, signal.SIGKILL)
                    is_killed = True
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            if until is None and seconds is not None:
                until = time.monotonic() + seconds
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._learn(json.loads(line))
        assert not rest, f"half a line: {rest!r}"
        if is_killed:
            self.counts["kills"] += 1

    def _learn(self, line: dict[str, Any]) -> None:
        agent = self._agents[line.pop("agent")]
        try:
            agent.learn(line, self.counts)
            if not line.keys() & {"call", "token"}:
                assert agent.call is not None
                agent.call["is_answered"] = True
        except AssertionError as error:
            self.wrong.append(f"{agent.owner}: {error}")


def kill_engines(
    folder: Path,
    durability: str,
    *,
    kills: int,
    agents: int,
    seed: int,
    is_early: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Counter[str], list[str], list[str]]:
    """Kill an engine so many times, at random moments. What its agents received, and what was wrong.

    The third, agents that gave up, is of `kill_often`: through a pipe none does.
    """
    rng = random.Random(seed)
    lives, longest = Lives(folder, durability, agents, seed, is_early=is_early), LONGEST_SECONDS
    while lives.counts["kills"] < kills and not lives.wrong and not is_over():
        lives.live(longest * rng.random() ** 2, is_from_fork=rng.random() < 0.25)
        if not lives.counts["from a file"] and not lives.counts["kills"] % PATIENT_KILLS:
            longest *= 2
    if not lives.wrong:
        lives.live(None)
    return lives.counts, lives.wrong, []
