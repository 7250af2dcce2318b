"""A standing pool of sessions of several owners, and random operations on it, each checked against the law.

One interleaving is a run of operations that do not wait for each other: appends, Generates, cancels, closes, evictions,
calls with another owner's session and calls that come at the wrong time. When it is over, every stream must hold the
tokens that its own history gives alone, every history what its owner put there and received, and the pool the bytes
that the open sessions reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import (
    HistoryLengthMismatch,
    HistoryLimit,
    NoCapacity,
    SessionBusy,
    SessionEvicted,
    SessionNotFound,
    TokenOutOfRange,
)
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import Finished, GenerateParams, Sampling, StopReason, TokenCommitted
from tests.load.alone import Alone
from tests.load.scripted import scripted_engine, solo_of
from tests.load.solo import Solo

OPERATIONS = 50
LIMIT_TOKENS = 112
KV_BYTES = 1_300_000  # so few that what is kept is given back for sessions, whatever the order of threads
FULL_AT = 80  # a session with so many tokens is closed, and another takes its place

# The law of these is known in closed form …
KNOWN: tuple[KVStrategy, ...] = (
    make_strategy("full"),
    make_strategy("sink_window", sink=2, window=20),
    make_strategy("sink_window", sink=0, window=7),
    make_strategy("layer_window", sink=4, window=16, full_layers=(1,)),
    make_strategy("restored", sink=4, window=16),
)
# … and these are run again alone, from what the journal says of them. (Strategies that add up in float32 are not here:
# the last digits of a sum would decide about tokens. `tests/laws` has them.)
REPLAYED: tuple[KVStrategy, ...] = (
    make_strategy("full", codec="int8", exact_window=16),
    make_strategy("sink_window", sink=2, window=44, codec="int8", exact_window=9),
)
CHECKED_LENGTHS = 32
CLOSED_SHARE = 0.5  # of sessions that begin alike, those that begin as one that is closed by then
ALL_BUSY_SHARE = 0.2  # of sessions too many, those that come while every session of their owner is in use


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The owners, and their sessions. replayed_share: of the sessions, those whose law is being run again alone."""

    owners: int = 8
    sessions: int = 16  # of each owner
    vocab_size: int = 256
    known: tuple[KVStrategy, ...] = KNOWN
    replayed: tuple[KVStrategy, ...] = REPLAYED
    replayed_share: float = 0.1


SCRIPTED = World()


class Wrong(AssertionError):
    """A promise was broken."""


@dataclass(kw_only=True)
class Stream:
    """A Generate that was started, and what its history was then."""

    generation: Generation
    first: int
    asked: int
    seed: int | None
    is_cancelled: bool = False


@dataclass(kw_only=True)
class Member:
    owner: str
    session_id: str
    strategy: KVStrategy
    solo: Solo | None
    history: list[int] = field(default_factory=list)
    stream: Stream | None = None


@dataclass
class Counts:
    """What was seen, so that a run can say what it covered."""

    interleavings: int = 0
    operations: int = 0
    streams: int = 0
    tokens: int = 0
    replayed: int = 0
    cancelled: int = 0
    evicted: int = 0
    alike: int = 0
    rewound: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, error: Exception) -> None:
        name = type(error).__name__
        self.refused[name] = self.refused.get(name, 0) + 1


class Population:
    """The pool. `engine` is the one to be judged; `alone` runs single sessions again."""

    def __init__(
        self,
        engine: Engine,
        journal: MemoryJournal,
        alone: Engine,
        *,
        replay_every: int = 1,
        world: World = SCRIPTED,
    ) -> None:
        self._engine, self._alone, self._world = engine, Alone(alone, journal), world
        self._replay_every = replay_every
        self.counts = Counts()
        self.members: list[Member] = []

    @staticmethod
    def engine(journal: MemoryJournal) -> Engine:
        """An engine in which the standing pool is all there may be: one more session evicts its owner's oldest.

        What closed ones leave is given back for open ones.
        """
        settings = {"share_prefixes": "owner", "prefix_bytes": KV_BYTES, "kv_bytes": KV_BYTES, **limits(SCRIPTED)}
        return scripted_engine(journal=journal, **settings)

    def fill(self, rng: np.random.Generator) -> None:
        for number in range(self._world.owners * self._world.sessions):
            self.members.append(self._open(f"owner-{number % self._world.owners}", rng))

    def interleave(self, rng: np.random.Generator, operations: int = OPERATIONS) -> None:
        """One interleaving. Raises Wrong."""
        moves: Sequence[tuple[Callable[[np.random.Generator, Member], None], float]] = (
            (self._append, 0.30),
            (self._generate, 0.34),
            (self._cancel, 0.10),
            (self._wait, 0.04),
            (self._intrude, 0.08),
            (self._mistake, 0.05),
            (self._disturb, 0.05),
            (self._close, 0.02),
            (self._begin_alike, 0.04),
            (self._rewind, 0.03),
            (self._crowd, 0.02),
        )
        chances = np.array([chance for _, chance in moves])
        for _ in range(operations):
            move = moves[rng.choice(len(moves), p=chances / chances.sum())][0]
            move(rng, self._pick(rng, is_running=move in (self._cancel, self._wait, self._disturb)))
            self.counts.operations += 1
        for member in self.members:
            self._finish(member)
        self._check_lengths(rng)
        self._check_pool()
        for index, member in enumerate(self.members):
            if len(member.history) >= FULL_AT:
                self._engine.close_session(member.session_id, owner=member.owner)
                self.members[index] = self._open(member.owner, rng)
        self.counts.interleavings += 1

    # -- operations -------------------------------------------------------------------------------------------------

    def _append(self, rng: np.random.Generator, member: Member) -> None:
        self._finish(member)
        ids = self._ids(rng, int(rng.integers(0, 13)))
        if len(member.history) + len(ids) > LIMIT_TOKENS:
            self._refused(lambda: self._engine.append(member.session_id, ids, owner=member.owner), HistoryLimit)
            return
        length = self._engine.append(
            member.session_id, ids, owner=member.owner, expected_history_length=len(member.history)
        )
        member.history += ids
        if length != len(member.history):
            raise Wrong(f"an append answered {length}, the history has {len(member.history)} tokens")

    def _generate(self, rng: np.random.Generator, member: Member) -> None:
        self._finish(member)
        if not member.history:
            return
        seed = int(rng.integers(2**32)) if rng.random() < 0.3 else None
        params = GenerateParams(
            max_tokens=int(rng.integers(1, 5)),
            sampling=Sampling() if seed is None else Sampling(temperature=1.0, seed=seed),
        )
        generation = self._engine.generate(member.session_id, params, owner=member.owner)
        member.stream = Stream(generation=generation, first=len(member.history), asked=params.max_tokens, seed=seed)

    def _cancel(self, _rng: np.random.Generator, member: Member) -> None:
        if member.stream is not None:
            member.stream.generation.cancel()
            member.stream.is_cancelled = True

    def _wait(self, _rng: np.random.Generator, member: Member) -> None:
        self._finish(member)

    def _intrude(self, rng: np.random.Generator, member: Member) -> None:
        """Another owner's session is no session, whatever is asked of it."""
        owners = self._world.owners
        intruder = f"owner-{(int(member.owner[-1]) + 1 + int(rng.integers(owners - 1))) % owners}"
        calls: Sequence[Callable[[], object]] = (
            lambda: self._engine.append(member.session_id, [1], owner=intruder),
            lambda: self._engine.generate(member.session_id, GenerateParams(max_tokens=1), owner=intruder),
            lambda: self._engine.session_info(member.session_id, owner=intruder),
            lambda: self._engine.close_session(member.session_id, owner=intruder),
        )
        self._refused(calls[int(rng.integers(len(calls)))], SessionNotFound)

    def _mistake(self, rng: np.random.Generator, member: Member) -> None:
        self._finish(member)
        length = len(member.history)
        wrong = length + int(rng.choice([-1, 1]))
        calls: Sequence[tuple[Callable[[], object], type[Exception]]] = (
            (
                lambda: self._engine.append(
                    member.session_id, [1], owner=member.owner, expected_history_length=abs(wrong)
                ),
                HistoryLengthMismatch,
            ),
            (
                lambda: self._engine.append(member.session_id, [1, self._world.vocab_size], owner=member.owner),
                TokenOutOfRange,
            ),
        )
        self._refused(*calls[int(rng.integers(len(calls)))])

    def _disturb(self, _rng: np.random.Generator, member: Member) -> None:
        """An append while a Generate runs: refused, or it came after the end."""
        if member.stream is None:
            return
        try:
            length = self._engine.append(member.session_id, [3], owner=member.owner)
        except SessionBusy as busy:
            self.counts.refuse(busy)
            return
        self._finish(member)
        member.history.append(3)
        if length != len(member.history):
            raise Wrong("an append came into the middle of a Generate")

    def _close(self, rng: np.random.Generator, member: Member) -> None:
        self._finish(member)
        if self._engine.close_session(member.session_id, owner=member.owner) != len(member.history):
            raise Wrong("a session closed with another length than its owner knows of")
        self._refused(lambda: self._engine.session_info(member.session_id, owner=member.owner), SessionNotFound)
        self.members[self.members.index(member)] = self._open(member.owner, rng)

    def _begin_alike(self, rng: np.random.Generator, member: Member) -> None:
        """A session that begins as another of its owner does takes the place of a third, or of that one."""
        self._finish(member)
        siblings = [other for other in self.members if other.owner == member.owner and other is not member]
        gone = siblings[int(rng.integers(len(siblings)))]
        if rng.random() < CLOSED_SHARE:
            gone = member
            if len(member.history) < FULL_AT // 2:  # what is short is not kept
                ids = self._ids(rng, FULL_AT // 2)
                self._engine.append(member.session_id, ids, owner=member.owner)
                member.history += ids
            self._generate(rng, member)
        self._finish(gone)
        self._engine.close_session(gone.session_id, owner=gone.owner)
        alike = self._open(member.owner, rng, member)
        self.members[self.members.index(gone)] = alike
        common = member.history[: int(rng.integers(len(member.history) + 1))]
        cut = int(rng.integers(len(common) + 1))
        for ids in (common[:cut], [*common[cut:], *self._ids(rng, 1)]):
            self._engine.append(alike.session_id, ids, owner=alike.owner)
            alike.history += ids
        self._generate(rng, alike)
        self.counts.alike += 1

    def _rewind(self, rng: np.random.Generator, member: Member) -> None:
        """Another session takes the member's place, with its first tokens."""
        self._finish(member)
        at = int(rng.integers(len(member.history) + 1))
        rewound = self._engine.rewind_session(member.session_id, at, owner=member.owner)
        self._refused(lambda: self._engine.session_info(member.session_id, owner=member.owner), SessionNotFound)
        member.session_id, member.history = rewound.session_id, member.history[:at]
        self.counts.rewound += 1

    def _crowd(self, rng: np.random.Generator, member: Member) -> None:
        """One session more than there is room for: an idle one of the same owner goes, and no other."""
        siblings = [other for other in self.members if other.owner == member.owner]
        if rng.random() < ALL_BUSY_SHARE:
            for other in siblings:
                if not other.history:
                    self._append(rng, other)
                if other.stream is None:
                    self._generate(rng, other)
        running = [other for other in siblings if other.stream is not None]
        try:
            opened = self._open(member.owner, rng)
        except NoCapacity as full:
            self.counts.refuse(full)
            if len(running) < len(siblings):
                raise Wrong("no room, though sessions of the owner are idle") from None
            return
        gone = [other for other in self.members if self._is_evicted(other)]
        if len(gone) != 1 or gone[0].owner != member.owner:
            raise Wrong(f"{len(gone)} sessions were evicted for one")
        # One whose Generate had ended already was idle, though its stream was not read yet: it is whole all the same.
        if gone[0].stream is not None:
            self._finish(gone[0])
        self.members[self.members.index(gone[0])] = opened
        self.counts.evicted += 1

    # -- judging ----------------------------------------------------------------------------------------------------

    def _finish(self, member: Member) -> None:
        """Wait for the member's Generate, if one runs, and judge it."""
        stream, member.stream = member.stream, None
        if stream is None:
            return
        *events, end = list(stream.generation)
        if not isinstance(end, Finished):
            raise Wrong(f"a stream ended with {end}")
        tokens = [event.token_id for event in events if isinstance(event, TokenCommitted)]
        positions = [event.position for event in events if isinstance(event, TokenCommitted)]
        if positions != list(range(stream.first, stream.first + len(tokens))) or end.generated_tokens != len(tokens):
            raise Wrong(f"tokens at {positions}, {end.generated_tokens} counted, after {stream.first} in the history")
        member.history += tokens
        if end.history_length != len(member.history):
            raise Wrong(f"the end says {end.history_length} tokens, its history has {len(member.history)}")
        is_whole = len(tokens) == stream.asked or len(member.history) >= LIMIT_TOKENS
        if not is_whole and not (stream.is_cancelled and end.stop_reason is StopReason.CANCELLED):
            raise Wrong(f"{len(tokens)} of {stream.asked} tokens, ended with {end.stop_reason}")
        self._judge(member, stream, tokens)
        self.counts.streams += 1
        self.counts.tokens += len(tokens)
        self.counts.cancelled += stream.is_cancelled

    def _judge(self, member: Member, stream: Stream, tokens: list[int]) -> None:
        if not tokens:
            return
        if member.solo is not None:
            expected = member.solo.tokens(member.history[:-1], stream.first, seed=stream.seed)
        elif self.counts.streams % self._replay_every == 0 and not self._is_evicted(member):
            expected = self._alone.tokens(
                member.session_id, member.history, stream.first, len(tokens), seed=stream.seed
            )
            self.counts.replayed += 1
        else:
            return
        if tokens != expected:
            raise Wrong(f"{member.strategy} gave {tokens}, its history alone gives {expected}")

    def _check_lengths(self, rng: np.random.Generator) -> None:
        """Of some sessions, whether or not anything was done to them."""
        for index in rng.choice(len(self.members), min(CHECKED_LENGTHS, len(self.members)), replace=False):
            member = self.members[index]
            reported = self._engine.session_info(member.session_id, owner=member.owner).history_length
            if reported != len(member.history):
                raise Wrong(f"the history has {reported} tokens, its owner knows of {len(member.history)}")

    def _check_pool(self) -> None:
        """All Generates are over: what is reserved is what the open sessions reserve, no byte more or less."""
        of_sessions = 0
        for member in self.members:
            facts = self._engine.session_info(member.session_id, owner=member.owner)
            if facts.reserved_bytes > facts.bound.sustained_bytes:
                raise Wrong(f"a session reserves {facts.reserved_bytes} bytes of {facts.bound.sustained_bytes}")
            of_sessions += facts.reserved_bytes
        info = self._engine.info()
        if (reserved := info.kv_reserved_bytes) != of_sessions:
            raise Wrong(f"{reserved} bytes are reserved, {of_sessions} by the sessions there are")
        kept = sum(self._engine.prefix_bytes_of(f"owner-{number}") for number in range(self._world.owners))
        if reserved + kept > info.kv_capacity_bytes:
            raise Wrong(f"{reserved} bytes are reserved and {kept} kept, of {info.kv_capacity_bytes}")

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _open(self, owner: str, rng: np.random.Generator, like: Member | None = None) -> Member:
        """like: with the strategy of this one."""
        choice = self._world.replayed if rng.random() < self._world.replayed_share else self._world.known
        strategy = choice[int(rng.integers(len(choice)))]
        if like is not None:
            strategy, choice = like.strategy, self._world.replayed if like.solo is None else self._world.known
        opened = self._engine.create_session(strategy=strategy, limit_tokens=LIMIT_TOKENS, owner=owner)
        return Member(
            owner=owner,
            session_id=opened.session_id,
            strategy=strategy,
            solo=solo_of(strategy) if choice is self._world.known else None,
        )

    def _pick(self, rng: np.random.Generator, *, is_running: bool) -> Member:
        """Any member; of those whose Generate runs, or not, if there are such."""
        some = [member for member in self.members if (member.stream is not None) == is_running] or self.members
        return some[int(rng.integers(len(some)))]

    def _ids(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, self._world.vocab_size, count)]

    def _is_evicted(self, member: Member) -> bool:
        try:
            self._engine.session_info(member.session_id, owner=member.owner)
        except SessionEvicted:
            return True
        return False

    def _refused(self, call: Callable[[], object], kind: type[Exception]) -> None:
        try:
            answer = call()
        except kind as refusal:
            self.counts.refuse(refusal)
        else:
            raise Wrong(f"{kind.__name__} was to be raised, the answer was {answer}")


def limits(world: World) -> dict[str, Any]:
    """Settings of an engine in which the standing pool is all there may be: one session more evicts one."""
    return {"max_sessions": world.owners * world.sessions, "session_evictable_seconds": 0.0}
