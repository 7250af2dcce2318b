"""The sessions of one API key, and which of them a request goes on with.

First the ids of a request are found. Messages up to an answer given here are known by their digest: the ids of that
answer are those that were generated, whatever the tokenizer makes of its text. What is not known is rendered. Then the
idle session that has most of these ids at its beginning is taken:

    what they share                                  the session
    its whole history                                goes on
    all but, in part, its last turn                  is rewound: a retry, or another last message
    less, but LEAST_SHARED tokens; or a kept answer  is forked: the longer conversation may go on
    less                                             is left alone, and a new one is made

A session serves one request at a time. Another one at the same time has a session of its own, by the same rules.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from kakeya import (
    AsyncClient,
    AsyncSession,
    HistoryBehindClient,
    HistoryCorrupt,
    HistoryLengthMismatch,
    InvariantViolated,
    KakeyaError,
    ModelMismatch,
    NoCapacity,
    QuotaExceeded,
    ServerInfo,
    SessionClosed,
    SessionNotFound,
    TemplateError,
)
from kakeya.tools import Tools
from kakeya_gateway.bodies import Ask, Json, Refused
from kakeya_gateway.texts import Texts

LEAST_SHARED = 32
_NAME_CHARACTERS = 24
# What a session can be lost by: what is known here of its history makes another.
_GONE = (
    *(SessionNotFound, SessionClosed, HistoryLengthMismatch, HistoryBehindClient, HistoryCorrupt, ModelMismatch),
    InvariantViolated,
)

Ids = array  # of "I"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One that is kept. message: what was said, None if it is an earlier gateway's. digest: of all up to its end."""

    end: int
    digest: bytes
    message: Json | None = None
    reply: Json | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class Conversation:
    """A session, and what is known here of its history.

    said: the digest of messages, and where the answer that is the last of them begins and ends, or, if there is none
    yet, where it is to begin. answers: those that are kept, by where they begin. floor: it is not rewound behind that.
    """

    name: str
    session: AsyncSession
    ids: Ids[int] = field(default_factory=lambda: array("I"))
    floor: int = 0
    said: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    is_busy: bool = False
    is_behind: bool = False  # the session's history may be longer
    used_at: float = field(default_factory=monotonic)

    def cut(self, length: int) -> None:
        del self.ids[length:]
        self.said = {digest: place for digest, place in self.said.items() if place[1] <= length}

    def end(self, ids: Sequence[int], *, is_whole: bool) -> tuple[int, int]:
        """The turn has ended with these ids; where they are now. is_whole: the session has no more than these."""
        start = len(self.ids)
        self.ids.extend(ids)
        self.is_busy, self.is_behind, self.used_at = False, not is_whole, monotonic()
        return start, len(self.ids)

    def keep(self, start: int, answer: Answer) -> None:
        self.answers[start], self.floor = answer, answer.end


class Conversations:
    def __init__(self, client: AsyncClient, texts: Texts, *, label: str, most: int, idle_seconds: float) -> None:
        """label: what those of this key are called on the server; most: how many are held."""
        self.client = client
        self.texts = texts
        self._label = label
        self._most = most
        self._idle_seconds = idle_seconds
        self._held: dict[str, Conversation] = {}
        self._finding = asyncio.Lock()
        self.info: ServerInfo
        self._used_at = monotonic()
        self.is_found = False  # what the server has of an earlier gateway's
        self.asking = 0  # requests that wait for it
        self._closing: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Ask the server. Raises Unauthenticated, and whatever else keeps this key from being served."""
        self._used_at = monotonic()
        self.info = await self.client.server_info()
        async with self._finding:
            if not self.is_found:
                await self._find()
                self.is_found = True

    def expire(self) -> bool:
        """Close sessions that were not used for long, or are too many. True: the key has none, and was not used."""
        limit = monotonic() - self._idle_seconds
        for each in [each for each in self._held.values() if not each.is_busy and each.used_at < limit]:
            self._close(each)
        while len(self._held) > self._most and (oldest := self._oldest()) is not None:
            self._close(oldest)
        return not self._held and not self._closing and self._used_at < limit

    async def ids_of(self, ask: Ask, tools: Tools | None) -> tuple[Ids[int], bytes]:
        """The ids of a conversation, up to where it is to be answered, and its digest."""
        messages = ask.messages
        if ask.after is not None:
            if (found := self.answer(ask.after)) is None:
                raise Refused("its session was closed meanwhile", param="previous_response_id", status=404)
            known, start = found
            answer = known.answers[start]
            calls = None if answer.message is None else answer.message.get("tool_calls", ())
            head = known.ids[: answer.end]
            new = await self.texts.go_on(messages, head[start:], calls, tools)
            return head + array("I", new), digests(answer.digest, messages)[-1]
        chain = digests(json.dumps(ask.tools).encode(), messages)
        for count in range(len(messages), 0, -1):
            same = next((each for each in self._held.values() if chain[count] in each.said), None)
            if same is None:
                continue
            start, end = same.said[chain[count]]
            head, rest = same.ids[:end], messages[count:]
            if not rest:
                return head, chain[-1]
            if start < end and all(message["role"] != "assistant" for message in rest):
                calls = messages[count - 1].get("tool_calls", ())
                with suppress(TemplateError):  # of a template that has to see the whole conversation
                    return head + array("I", await self.texts.go_on(rest, head[start:], calls, tools)), chain[-1]
                break
        return array("I", await self.texts.begin(messages, tools)), chain[-1]

    def answer(self, name: str) -> tuple[Conversation, int] | None:
        """Where a kept answer is: its conversation, and its beginning there."""
        known, place = self._held.get(name[:_NAME_CHARACTERS]), name[_NAME_CHARACTERS:]
        start = int(place, 16) if re.fullmatch("[0-9a-f]{8}", place) else -1
        return (known, start) if known is not None and start in known.answers else None

    def drop(self, name: str) -> None:
        """Forget a kept answer, and close its session if that has no other."""
        if (found := self.answer(name)) is not None:
            known, start = found
            del known.answers[start]
            if not known.answers and not known.is_busy:
                self._close(known)

    async def open(self, ids: Ids[int], digest: bytes) -> Conversation:
        """A session with this history, for one turn. Raises the errors of the SDK that no other session helps."""
        while True:
            source, length = self._longest(ids)
            taken = source if source is not None and length >= source.floor else None
            try:
                if taken is not None:
                    await self._continue(taken, length)
                elif source is not None:
                    taken = await self._fork(source, length)
                    taken.floor = len(ids)
                else:
                    name = secrets.token_hex(_NAME_CHARACTERS // 2)
                    created = await self.client.create_session(label=f"{self._label}/{name}")
                    taken = self._hold(Conversation(name=name, session=created, floor=len(ids)))
                # None, too: it says whether the session is there.
                await taken.session.append(ids[len(taken.ids) :], expected_history_length=len(taken.ids))
            except _GONE:
                if source is None:
                    raise
                self._close(source)
                if taken not in (None, source):
                    self._close(taken)
            except (NoCapacity, QuotaExceeded):
                self._release(taken)
                if not await self._make_room():
                    raise
            except BaseException:
                self._release(taken)
                raise
            else:
                taken.ids = ids[:]
                taken.said[digest] = len(ids), len(ids)
                return taken

    async def _continue(self, taken: Conversation, length: int) -> None:
        taken.is_busy = True
        if length == len(taken.ids):
            taken.floor = length
        if length < len(taken.ids) or taken.is_behind:
            taken.session = await taken.session.rewind(length)
            taken.is_behind = False
            taken.cut(length)

    async def _fork(self, source: Conversation, length: int) -> Conversation:
        name = secrets.token_hex(_NAME_CHARACTERS // 2)
        source.is_busy = True
        try:
            forked = await source.session.fork(at_position=length, label=f"{self._label}/{name}")
        finally:
            source.is_busy = False
        new = Conversation(name=name, session=forked, ids=source.ids[:], said=dict(source.said))
        new.cut(length)
        return self._hold(new)

    def _release(self, taken: Conversation | None) -> None:
        """After a failure: what the session has now is at least what is known of it, or nothing."""
        if taken is None:
            return
        taken.is_busy, taken.is_behind = False, True
        if not taken.said:
            self._close(taken)

    def _longest(self, ids: Ids[int]) -> tuple[Conversation | None, int]:
        """The idle session that has most of these ids, and how many; None: none has enough."""
        best: Conversation | None = None
        rank = (0, False, 0.0)
        for each in self._held.values():
            if not each.is_busy:
                length = shared(ids, each.ids)
                if (own := (length, length >= each.floor, each.used_at)) > rank:
                    best, rank = each, own
        if best is not None and (rank[1] or rank[0] >= LEAST_SHARED):
            return best, rank[0]
        return None, 0

    def _hold(self, new: Conversation) -> Conversation:
        new.is_busy = True
        self._held[new.name] = new
        self.expire()
        return new

    def _oldest(self) -> Conversation | None:
        idle = [each for each in self._held.values() if not each.is_busy]
        return min(idle, key=lambda each: each.used_at, default=None)

    async def _make_room(self) -> bool:
        """Close the session that was not used for longest. False: there is none."""
        if (oldest := self._oldest()) is None:
            return False
        self._close(oldest)
        await asyncio.gather(*self._closing)
        return True

    def _close(self, known: Conversation) -> None:
        self._held.pop(known.name, None)

        async def close() -> None:
            with suppress(KakeyaError):
                await known.session.close()

        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _find(self) -> None:
        """Take up the sessions of an earlier gateway with this label, those used last first."""
        mine = f"{self._label}/"
        listed = [each async for each in self.client.sessions() if each.label.startswith(mine)]
        fit = (each for each in listed if not each.failure_reason and not each.is_generating)
        for each in sorted(fit, key=lambda each: each.idle_seconds)[: self._most]:
            with suppress(*_GONE):
                found = Conversation(name=each.label.removeprefix(mine), session=await self.client.session(each.id))
                async for piece in found.session.history():
                    _take_up(found, piece.token_ids, piece.run_lengths)
                found.used_at -= each.idle_seconds
                found.floor = len(found.ids)
                self._held[found.name] = found


def _take_up(found: Conversation, ids: Sequence[int], run_lengths: Sequence[int]) -> None:
    """Add a piece of the history. Runs are appended and generated by turns; one may have begun in the last piece."""
    end = len(found.ids)
    found.ids.extend(ids)
    for place, length in enumerate(run_lengths):
        start, end = end, end + length
        if place % 2 and length:
            begun = next((first for first, answer in found.answers.items() if answer.end == start), start)
            found.answers[begun] = Answer(end=end, digest=f"{found.name}{end}".encode())


def digests(root: bytes, messages: Sequence[Json]) -> list[bytes]:
    """One of no message, then one more behind each; every one depends on all before it, but for reasoning: that is in
    the ids of an answer, and most clients send none back."""
    chain = [root]
    for message in messages:
        said = {name: value for name, value in message.items() if name != "reasoning_content"}
        text = json.dumps(said, sort_keys=True, ensure_ascii=True)
        chain.append(hashlib.sha256(chain[-1] + text.encode()).digest())
    return chain


def shared(one: Ids[int], other: Ids[int]) -> int:
    """With how many equal ids both begin. Arrays are compared faster than their items."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
