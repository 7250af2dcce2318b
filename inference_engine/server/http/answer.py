"""Turns the events of one Generate into an answer: text, finish reason, usage."""

from __future__ import annotations

from collections.abc import AsyncIterator

from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.replies import Json, Usage, logprob_entry
from inference_engine.server.http.single_shot import Prompt
from inference_engine.server.http.text import StopStrings
from inference_engine.server.stream import EventQueue
from inference_engine.types import Accepted, Event, Failed, Finished, StopReason, TokenCommitted, Truncated

_FINISH_REASONS = {
    StopReason.EOS: "stop",
    StopReason.MAX_TOKENS: "length",
    StopReason.TRUNCATED: "length",
}


class Answer:
    """Consumes events until `is_finished`: the Generate has ended, or a stop string is complete."""

    def __init__(self, prompt: Prompt, chat: ChatText) -> None:
        self.finish_reason = ""
        self.dropped_tokens = 0
        self._prompt = prompt
        self._chat = chat
        self._text = chat.text_stream()
        self._stops = StopStrings(prompt.asked.stops)
        self._ends = frozenset((*chat.end_ids, *prompt.params.stop_token_ids))
        self._completion_tokens = 0
        self._logprobs: list[Json] = []

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def usage(self) -> Usage:
        """The usage so far. A token that ended the answer counts."""
        return Usage(prompt_tokens=len(self._prompt.token_ids), completion_tokens=self._completion_tokens)

    def take(self, event: Event) -> str:
        """The text that can be sent now. Raises the error of a Failed."""
        if isinstance(event, TokenCommitted):
            return self._take_token(event)
        if isinstance(event, Finished):
            self.finish_reason = _FINISH_REASONS[event.stop_reason]
            return self._stops.end()
        if isinstance(event, Truncated):
            self.dropped_tokens = event.dropped_tokens
        if isinstance(event, Failed):
            raise event.error
        return ""

    def pop_logprobs(self) -> list[Json] | None:
        """The logprobs since the last call, without the token that ended the answer; None: not requested.

        Text may wait for a stop string or the rest of a character; logprobs do not.
        """
        if not self._prompt.asked.logprobs:
            return None
        entries, self._logprobs = self._logprobs, []
        return entries

    def _take_token(self, event: TokenCommitted) -> str:
        self._completion_tokens += 1
        if event.token_id in self._ends:
            return ""
        if event.logprob is not None:
            self._logprobs.append(logprob_entry(*self._chat.token_text(event.token_id), event.logprob))
        shown = self._stops.push(self._text.push(event.token_id))
        if self._stops.is_matched:
            self.finish_reason = "stop"
        return shown


async def until_work_begins(events: EventQueue) -> list[Event]:
    """The events up to the first one that is not Accepted. Raises the error of a Failed.

    Until the answer begins, an error can still be sent as an HTTP status.
    """
    first: list[Event] = []
    while all(isinstance(event, Accepted) for event in first):
        await events.wait()
        first += events.pop_all()
    for event in first:
        if isinstance(event, Failed):
            raise event.error
    return first


async def follow(first: list[Event], events: EventQueue) -> AsyncIterator[Event]:
    """`first`, then all further events, without end."""
    for event in first:
        yield event
    while True:
        await events.wait()
        for event in events.pop_all():
            yield event
