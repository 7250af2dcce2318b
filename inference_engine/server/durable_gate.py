"""The durability gate: what is sent to a client waits here until the journal has synced what it says.

An answer says how far one session has come, and has that session's receipt from the journal. Receipts become safe in
the order of their numbers, a commit for many, so the journal is asked for the lowest number only.

event loop          wait 7, wait 9, wait 7 │ ask for 7                 │ those with 7 go on, ask for 9
journal's thread                           │ commit of 5 to 8, wake up │ commit of 9 …

What cannot be safe now ends a call with a typed error, and pauses a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial

from inference_engine.errors import JournalAway, JournalFull, SessionElsewhere
from inference_engine.server.stream import WOKEN_AT_ONCE
from inference_engine.session.journal import Journal, Receipt


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    receipt: Receipt
    unless_full: bool
    unless_away: bool
    goes_on: asyncio.Future[None]


class DurableGate:
    """Event loop only."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[_Waiter] = []
        self._asked: int | None = None  # the number that the journal was asked for and has not answered
        self._is_asking = False  # at the end of this turn of the loop
        self._free = deque[asyncio.Future[None]]()  # that go on, some at a time

    async def confirmed(self, receipt: Receipt, *, of_error: bool = False) -> None:
        """Wait until an answer may be sent. Raises what is sent instead: JournalFull for what was refused, and so is
        undone; JournalAway for what is safe later, or never; SessionElsewhere for a session that others took over.

        of_error: of a call that changed nothing, which waits for no space either; JournalFull, too, if there is none.
        """
        while not await self.synced(receipt, unless_full=of_error, unless_away=True):
            if receipt.is_lost:
                raise SessionElsewhere(is_pending=not of_error)
            if receipt.is_refused:
                raise JournalFull
            if self._journal.is_away:
                raise JournalAway(is_pending=not of_error)
            self._journal.refuse_when_blocked()  # else it has just become possible again

    async def synced(
        self,
        receipt: Receipt,
        *,
        unless_full: bool = False,
        unless_away: bool = False,
        most_seconds: float | None = None,
    ) -> bool:
        """Wait until it is safe, or was refused: then it is undone, and the answer is False.

        unless_full: do not wait for space on a full disk; False, too, if there is none. unless_away: do not wait for a
        journal that is away. most_seconds: do not wait longer for a slow one; False, too, if it is not safe by then.

        What is safe waits, in a journal that several servers share, for the proof that the sessions are still this
        one's: it may have been stopped since, for so long that others took them. Raises SessionElsewhere then.
        """
        settled = partial(self._settled, unless_full=unless_full, unless_away=unless_away, most_seconds=most_seconds)
        if not (is_safe := await settled(receipt)) or (proof := self._journal.proof()).is_safe:
            return is_safe
        is_ours = await settled(proof)
        if proof.is_lost:
            raise SessionElsewhere(is_pending=True)
        return is_ours

    async def proved(self) -> None:
        """Wait for the proof that what is in memory is this server's; else it has left memory then.

        Raises JournalAway.
        """
        while not (proof := self._journal.proof()).is_safe:
            await self._settled(proof, unless_full=False, unless_away=True, most_seconds=None)
            if proof.is_lost:
                return
            if self._journal.is_away:
                raise JournalAway

    async def _settled(
        self, receipt: Receipt, *, unless_full: bool, unless_away: bool, most_seconds: float | None
    ) -> bool:
        if not self._is_over(receipt, unless_full=unless_full, unless_away=unless_away):
            loop = asyncio.get_running_loop()
            waiter = _Waiter(receipt, unless_full, unless_away, loop.create_future())
            self._waiting.append(waiter)
            self._ask_soon(loop)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_seconds):
                    await waiter.goes_on
        return receipt.is_safe

    def _is_over(self, receipt: Receipt, *, unless_full: bool, unless_away: bool) -> bool:
        if receipt.is_safe or receipt.is_refused:
            return True
        return (unless_full and self._journal.is_full) or (unless_away and self._journal.is_away)

    def _ask_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Those who come in one turn of the loop are asked for together at its end."""
        if not self._is_asking:
            self._is_asking = True
            loop.call_soon(self._ask, loop)

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_asking = False
        first = min((waiter.receipt for waiter in self._waiting), key=lambda one: one.number, default=None)
        if first is None or (self._asked is not None and self._asked <= first.number):
            return
        self._asked = first.number

        def wake() -> None:
            # The loop is closed only when the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._look, loop)

        self._journal.on_saved(wake, first)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """The journal has answered: some go on, and it is asked for the others."""
        self._asked = None
        waiting, self._waiting = self._waiting, []
        if not self._free:
            loop.call_soon(self._let_go, loop)
        for waiter in waiting:
            if self._is_over(waiter.receipt, unless_full=waiter.unless_full, unless_away=waiter.unless_away):
                self._free.append(waiter.goes_on)
            elif not waiter.goes_on.done():  # else its call is over
                self._waiting.append(waiter)
        if self._waiting:
            self._ask_soon(loop)

    def _let_go(self, loop: asyncio.AbstractEventLoop) -> None:
        """Between so many of them other calls have their turn."""
        for _ in range(min(WOKEN_AT_ONCE, len(self._free))):
            if not (waiter := self._free.popleft()).done():  # its call may be over
                waiter.set_result(None)
        if self._free:
            loop.call_soon(self._let_go, loop)
