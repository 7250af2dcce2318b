"""Kills of an engine that acknowledges through a pipe: no network, no SDK, and many more kills a second.

    this process            knows what each agent received, and forks a life
    a life, forked          an engine on the folder; its agents go on with what they know, and tell of each call
                            before they make it, and of each answer once the engine says that it is saved
    SIGKILL, at any moment  also while the life opens the folder; what was written into the pipe by then counts

A call that was sent and not answered is made again in the next life, with its request id, and some of those that were
answered, too: the answer is the same, and nothing is done twice. An agent goes on with a session and with forks of it,
by turns, and goes back; it has more of them than may be in memory, so each leaves it now and then, and comes back. What
it closed, or rewound to be another session, stays closed. The process that forks must have no threads, and no engine of
its own.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.errors import QuotaExceeded, SessionNotFound
from inference_engine.kv.strategies.full import Full
from inference_engine.metrics import EngineMetrics
from inference_engine.types import Durability, Failed, Finished, GenerateParams, Sampling, TokenCommitted
from laboratory.scripted import Script
from tests.load.early import opened
from tests.load.scripted import scripted_engine, solo_of

MOST_TOKENS = 250  # of one session
LONGEST_SECONDS = 0.2  # until a kill; most come sooner, when much is new
# After as many kills without some of that, lives become twice as long: the machine is busy. A session has to have left
# memory, and K/V to have come from a file.
PATIENT_KILLS, LATE = 15, ("came back", "from a file")
IDLE_SECONDS = 0.03  # between some calls, so that there are copies of K/V
MOST_SESSIONS = 3  # of an agent, and how many of them may be in memory: one can be forked, and the third leaves
IN_MEMORY = 2
ASKED_AGAIN = 8  # answered calls that an agent remembers: as many Generates of a session can be named
PATIENCE_SECONDS = 30.0
LAW = solo_of(Full())
SETTINGS: dict[str, Any] = {
    # Copies of K/V are written and read as often as can be.
    "hibernate": "always",
    "hibernate_after_seconds": 0.0,
    "max_sessions_per_owner": IN_MEMORY,
    "session_evictable_seconds": 0.0,
}


@dataclass
class Agent:
    """What an agent knows: its sessions, what it received of each, and the call that it waits for."""

    number: int
    sessions: dict[str, list[int]] = field(default_factory=dict)  # their histories
    call: dict[str, Any] | None = None
    received: list[int] = field(default_factory=list)  # of the Generate that it waits for
    # Calls with their answers.
    answered: deque[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=ASKED_AGAIN))
    closed: str = ""  # the session that it closed last

    @property
    def owner(self) -> str:
        return f"agent-{self.number}"

    @property
    def waiting(self) -> dict[str, Any]:
        """The call that has no answer; an empty one: there is none."""
        return {} if self.call is None or self.call.get("is_answered") else self.call

    def known(self, session: str) -> list[int]:
        return self.sessions[session] + (self.received if self.waiting.get("session") == session else [])

    def next_call(self, rng: random.Random) -> dict[str, Any]:
        call: dict[str, Any] = {"id": rng.randbytes(16).hex()}
        before = self.call or {"kind": ""}
        if not self.sessions:
            return call | {"kind": "create", "session": ""}
        if before["kind"] == "append":
            most = rng.randrange(1, 40)
            return call | {
                "kind": "generate",
                "session": before["session"],
                "most": most,
                "drawn": rng.random() < 0.5,
            }
        session = rng.choice(list(self.sessions))
        call |= {"session": session}
        is_one_of_many = len(self.sessions) == MOST_SESSIONS and rng.random() < 0.15
        if is_one_of_many or len(self.sessions[session]) >= MOST_TOKENS:
            return call | {"kind": "close"}
        if self.sessions[session] and len(self.sessions) < MOST_SESSIONS and rng.random() < 0.6:
            return call | {"kind": "fork", "at": self._place(session, rng)}
        if self.sessions[session] and rng.random() < 0.15:
            return call | {"kind": "rewind", "at": self._place(session, rng)}
        return call | {"kind": "append", "ids": [rng.randrange(256) for _ in range(rng.randrange(1, 30))]}

    def _place(self, session: str, rng: random.Random) -> int:
        """A position of its history, the end as often as all others."""
        length = len(self.sessions[session])
        return rng.choice([length, rng.randrange(length)])

    def learn(self, line: dict[str, Any], counts: Counter[str]) -> None:
        """What a life has sent. Raises AssertionError if it cannot be."""
        if "wrong" in line:
            raise AssertionError(line["wrong"])
        counts["asked again"] += line.pop("asked_again", 0)
        if "call" in line:
            self.call, self.received = line["call"], []
            return
        assert self.call is not None
        kind, session = self.call["kind"], self.call["session"]
        if "token" in line:
            known = len(self.known(session))
            assert line["position"] == known, f"position {line['position']} after {known} tokens"
            self.received.append(line["token"])
            counts["tokens"] += 1
            return
        if kind == "create":
            session = line["session"]
            self.sessions[session] = []
            counts["sessions"] += 1
        elif kind in ("fork", "rewind"):
            ids = self.sessions[session][: self.call["at"]]
            if kind == "rewind":
                del self.sessions[session]
                self.closed = session
            session = line["session"]
            self.sessions[session] = ids
        elif kind == "append":
            self.sessions[session] += self.call["ids"]
        elif kind == "generate":
            first, received = len(self.sessions[session]), self.received
            self.sessions[session], self.received = self.known(session), []
            assert len(received) == self.call["most"], f"{len(received)} tokens of {self.call['most']}"
            LAW.check(self.sessions[session], first, line["seed"] if self.call["drawn"] else None)
            counts["from a file"] += line["from_file"]
        length = len(self.sessions[session])
        assert line["length"] == length, f"{kind} is answered with {line['length']}, not {length}"
        if kind == "close":
            del self.sessions[session]
            self.closed = session
        self.answered.append((self.call, line))
        counts["came back"] += line["came_back"]
        counts[kind] += 1


class Life:
    """An engine with its agents, in a process that will be killed."""

    def __init__(self, engine: Engine, agents: list[Agent], pipe: int, *, is_last: bool) -> None:
        self._engine, self._agents, self._pipe, self._is_last = engine, agents, pipe, is_last
        # Sessions that had no Generate since they came into memory; those that were there; and what a call has made.
        self._idle = {session for agent in agents for session in agent.sessions}
        self._seen = set[str]()
        self._made: dict[int, set[str]] = {}
        self._asked_again = Counter[int]()  # sent with the next line

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
        line |= {"asked_again": self._asked_again.pop(agent.number)} if agent.number in self._asked_again else {}
        text = json.dumps({"agent": agent.number, **line}) + "\n"
        assert len(text) < select.PIPE_BUF, "a longer line could be torn by a kill"
        os.write(self._pipe, text.encode())
        agent.learn(line, Counter())

    def _saved(self) -> None:
        done = threading.Event()
        self._engine.journal.on_saved(done.set)
        done.wait()

    def _talk(self, agent: Agent, rng: random.Random) -> None:
        try:
            self._check(agent, rng)
            is_new = not agent.waiting
            while not (is_new and self._is_last):
                if is_new:
                    if rng.random() < 0.3:
                        time.sleep(IDLE_SECONDS)
                    self._tell(agent, call=agent.next_call(rng))
                assert agent.call is not None
                answer = self._made_by(agent, agent.call)
                made = self._made.pop(agent.number, set())  # by the same call before
                assert made <= {answer.get("session")}, f"{agent.call} was done twice"
                self._tell(agent, **answer)
                agent.call["is_answered"] = is_new = True
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test is for
            text = f"{agent.owner}: {type(error).__name__}: {error}"
            os.write(self._pipe, (json.dumps({"agent": agent.number, "wrong": text[:1000]}) + "\n").encode())

    def _check(self, agent: Agent, rng: random.Random) -> None:
        """The agent has the sessions that it knows, and their histories are those that it knows: no call that has no
        answer has done more than it may. Some calls that have answers are made again, and their answers are the same.
        """
        waiting, owner = agent.waiting, agent.owner
        kind, session = waiting.get("kind"), waiting.get("session", "")
        listed = {one.session_id for one in self._engine.list_sessions(owner=owner)}
        gone, made = agent.sessions.keys() - listed, listed - agent.sessions.keys()
        ended = {session} if kind in ("close", "rewind") else set()
        assert gone <= ended, f"of {len(agent.sessions)} sessions {gone} are gone"
        opens = kind in ("create", "fork", "rewind")
        assert len(made) <= opens, f"{len(made)} sessions that no call has made, {kind} waits"
        assert kind != "rewind" or len(made) == len(gone), f"half a rewind: {gone} are gone, and {made} were made"
        self._made[agent.number] = made
        for one in sorted(agent.sessions.keys() - gone):
            if one == session or rng.random() < 0.5:
                self._check_history(agent, one, waiting if one == session else {})
        for one in made:
            self._bring_back(agent, one)
            ids = self._engine.read_history(one, owner=owner).token_ids.tolist()
            first = agent.sessions[session][: waiting["at"]] if kind != "create" else []
            assert ids == first, f"{kind} has made another history: {ids}"
        if agent.closed:
            self._engine.recall(agent.closed, owner=owner)
            try:
                self._engine.session_info(agent.closed, owner=owner)
                raise AssertionError("a session that was closed is there again")
            except SessionNotFound:
                pass
        if agent.answered and rng.random() < 0.5:
            call, answer = rng.choice(agent.answered)
            if call["kind"] != "generate":
                self._ask_again(agent, call, answer)
            elif call["session"] in agent.sessions.keys() - gone:  # else it is forgotten
                self._generate_again(agent, call, answer)
            self._asked_again[agent.number] += 1

    def _check_history(self, agent: Agent, session: str, waiting: dict[str, Any]) -> None:
        """It begins with what the agent knows, and has nothing behind it but what its call may have added."""
        self._bring_back(agent, session)
        ids = self._engine.read_history(session, owner=agent.owner).token_ids.tolist()
        known, more = agent.known(session), ids[len(agent.known(session)) :]
        assert ids[: len(known)] == known, f"{len(known)} tokens received; the history of {len(ids)} has others"
        if waiting.get("kind") == "append":
            assert more in ([], waiting["ids"]), f"{len(more)} tokens more than received, of an append of {waiting}"
        else:
            most = waiting["most"] - len(agent.received) if waiting.get("kind") == "generate" else 0
            assert len(more) <= most, f"{len(more)} tokens more than received, at most {most} were asked for"

    def _ask_again(self, agent: Agent, call: dict[str, Any], answer: dict[str, Any]) -> None:
        """Make a call that was answered: it has the same answer, and does nothing."""
        found = self._made_by(agent, call)
        for name in answer.keys() & {"session", "length"}:
            assert found[name] == answer[name], f"asked again, {call} is answered {found}, not {answer}"
        assert found["replayed"], f"{call} was done again"

    def _generate_again(self, agent: Agent, call: dict[str, Any], answer: dict[str, Any]) -> None:
        """The same for a Generate, whose history may have grown since."""
        self._bring_back(agent, call["session"])
        *tokens, ended = self._generate(agent, call, None)
        received = [event.token_id for event in tokens if isinstance(event, TokenCommitted)]
        assert isinstance(ended, Finished), ended
        assert ended.is_replayed, "a Generate that had ended ran again"
        end = answer["length"]
        known = agent.sessions[call["session"]][end - call["most"] : end]
        assert received == known, f"asked again, a Generate has {received}, not {known}"
        assert ended.seed == answer["seed"], f"asked again, a Generate has the seed {ended.seed}"

    def _bring_back(self, agent: Agent, session: str, request_id: bytes = b"") -> bool:
        """As a server does before each call. Had the session left memory in this life?"""
        named: dict[str, Any] = {"owner": agent.owner}
        has_left = session in self._seen and self._engine.is_elsewhere(session, **named)
        patiently(lambda: self._engine.recall(session, request_id=request_id, **named))
        if session:
            self._seen.add(session)
        if has_left:
            self._idle.add(session)
        return has_left

    def _generate(self, agent: Agent, call: dict[str, Any], resume_from: int | None) -> Iterator[Any]:
        sampling = Sampling(temperature=1.0) if call["drawn"] else Sampling()
        params = GenerateParams(max_tokens=call["most"], sampling=sampling)
        return iter(
            self._engine.generate(
                call["session"],
                params,
                request_id=bytes.fromhex(call["id"]),
                resume_from=resume_from,
                wait_seconds=10.0,
                owner=agent.owner,
            )
        )

    def _made_by(self, agent: Agent, call: dict[str, Any]) -> dict[str, Any]:
        """Make a call: the line with its answer, which is saved. A Generate's tokens are sent before."""
        engine, kind, session = self._engine, call["kind"], call["session"]
        request_id = bytes.fromhex(call["id"])
        named: dict[str, Any] = {"owner": agent.owner, "request_id": request_id}
        came_back = self._bring_back(agent, session, request_id if kind != "generate" else b"")
        line: dict[str, Any] = {"came_back": came_back}
        if kind == "generate":
            known = len(agent.known(session)) if agent.received else None  # before its first token it is the whole call
            for event in self._generate(agent, call, known):
                if isinstance(event, TokenCommitted):
                    self._tell(agent, token=event.token_id, position=event.position)
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Finished):
                    from_file = bool(event.cached_tokens) and session in self._idle
                    line |= {"length": event.history_length, "seed": event.seed, "from_file": from_file}
            self._idle.discard(session)
            self._saved()
            return line
        made: Callable[[], Any] = {
            "create": lambda: engine.create_session(**named),
            "fork": lambda: engine.fork_session(session, at_position=call["at"], wait_seconds=10.0, **named),
            "rewind": lambda: engine.rewind_session(session, call.get("at", 0), wait_seconds=10.0, **named),
            "append": lambda: engine.append_once(session, call.get("ids", []), wait_seconds=10.0, **named),
            "close": lambda: engine.close_once(session, **named),
        }[kind]
        found = patiently(made)
        self._saved()
        line |= {"replayed": found.is_replayed}
        if kind in ("append", "close"):
            return line | {"length": found.tokens}
        self._seen.add(found.session_id)
        return line | {"session": found.session_id, "length": 0 if kind == "create" else found.history_length}


def patiently(call: Callable[[], Any]) -> Any:
    """Call again while there is no place: what could leave memory is in use while it is forked, or copied to a file."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call()
        except QuotaExceeded:
            assert time.monotonic() < until, "no session leaves memory"
            time.sleep(0.001)


class Lives:
    """Forks lives on one folder, and learns from each what its agents received."""

    def __init__(self, folder: Path | str, durability: str, agents: int, seed: int, *, is_early: bool) -> None:
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
        journal = opened(str(self._folder), self._durability, metrics, is_early=self._is_early)
        kept: dict[str, Any] = {"journal": journal, "metrics": metrics, "state_dir": str(self._folder)}
        with scripted_engine(**kept, script=Script(step_seconds=0.001), **SETTINGS) as engine:
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
    folder: Path | str,
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
        is_too_short = not all(lives.counts[name] for name in LATE)
        if is_too_short and not lives.counts["kills"] % PATIENT_KILLS:
            longest *= 2
    if not lives.wrong:
        lives.live(None)
    return lives.counts, lives.wrong, []
