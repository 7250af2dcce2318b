"""Text to ids and back: conversations by the model's template, answers piece by piece, and where a stop string cuts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kakeya import TemplateError
from kakeya.tokenization import ChatTokenizer, tokens_for_chat, tokens_for_next_turn

Message = dict[str, Any]

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Texts:
    """A tokenizer, used by one thread at a time, so that long conversations do not hold up the answers of others."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "texts")

    async def begin(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a whole conversation. Raises TemplateError, InvalidMessages or TokenizerError."""
        return await self._run(partial(tokens_for_chat, messages, self._tokenizer))

    async def go_on(self, messages: Sequence[Message], after: Sequence[int]) -> list[int]:
        """The ids of new messages behind an answer, whose ids are `after`. Raises as `begin`."""
        return await self._run(partial(tokens_for_next_turn, messages, self._tokenizer, after=after))

    async def go_on_if_possible(self, messages: Sequence[Message], after: Sequence[int]) -> list[int] | None:
        """None where the template has to see the whole conversation."""
        try:
            return await self.go_on(messages, after)
        except TemplateError:
            return None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    async def _run(self, render: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, render)


class Pieces:
    """The text of an answer as its ids come, without characters that are not complete, up to a stop string.

    A character can take several ids, and the text of an id can depend on the one before it: a piece is what decoding
    adds to the ids shown last. Text that may be the beginning of a stop string waits for what follows.
    """

    def __init__(self, texts: Texts, stops: Sequence[str]) -> None:
        self._texts = texts
        self._stops = stops
        self._ids: list[int] = []
        self._start = self._shown = 0
        self._waiting = ""
        self.stop: str | None = None  # the string that ended the answer

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        added = self._added()
        if not added or added.endswith(_BROKEN):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        text = self._waiting + added
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, cut, self.stop = min(found)
        else:
            cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._waiting = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """What waited, once no more ids come."""
        return "" if self.stop is not None else self._waiting + self._added().rstrip(_BROKEN)

    def _added(self) -> str:
        before = self._texts.decode(self._ids[self._start : self._shown])
        return self._texts.decode(self._ids[self._start :])[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
