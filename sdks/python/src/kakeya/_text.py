"""What a Generate says, as text: pieces while it comes, up to a stop string, and where in the history that was.

A stop string is text, so it is the client's: the server sees ids, and one string has many spellings in them. The text
before it is given out, nothing of it is; the tokens that spell it are in the history, and `position` says how much of
that to keep to have the text alone there: `session.rewind(position)`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from kakeya._checks import flag, invalid, text
from kakeya._reply_text import ReplyText, StopStrings
from kakeya._values import GenerateResult

if TYPE_CHECKING:
    from kakeya._async import AsyncGenerateStream
    from kakeya._sync import GenerateStream


class Decodes(Protocol):
    """What is needed of a tokenizer here: transformers' own have it."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TextResult:
    """A Generate that was read as text."""

    text: str  # without the stop string
    stop: str | None  # the stop string that ended it; None: none did
    position: int  # history up to the text's last token: the first token that is not wholly before the stop string
    token_ids: tuple[int, ...]  # all that came; those from `position` on are in the history, too
    result: GenerateResult | None  # None: a stop string ended it, so the Generate was cancelled


class IncrementalDetokenizer:
    """Folds tokens into text; what both kinds of streams do."""

    def __init__(
        self, tokenizer: Decodes, stop: Iterable[str], *, skip_special_tokens: bool, min_tokens: int = 0
    ) -> None:
        """min_tokens: a stop string that is complete within so many does not count."""
        if isinstance(stop, str):
            raise invalid("stop", f"must be a sequence of texts, got the text {stop!r}")
        stops = [text(one, f"stop[{index}]") for index, one in enumerate(stop)]
        if "" in stops:
            raise invalid("stop", f"must not hold an empty text, got {stops!r}")
        options = {"skip_special_tokens": flag(skip_special_tokens, "skip_special_tokens")}
        self._reply = ReplyText(lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options)))
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._first: int | None = None  # position of the first token
        self._reached = [0]  # characters that are complete after each number of tokens
        self._shown = 0
        self.text = ""
        self.is_over = False

    @property
    def stop(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int, position: int) -> str:
        """The text that can be shown now."""
        self._first = position if self._first is None else self._first
        piece = self._reply.push(token_id)
        self._reached.append(self._reached[-1] + len(piece))
        shown = self._stops.push(piece, may_stop=len(self._reached) > self._min_tokens + 1)
        return self._shows(shown, is_over=self._stops.matched is not None)

    def end(self) -> str:
        """There are no more tokens: the text that was held back."""
        return self._shows(self._stops.end(), is_over=True)

    def _shows(self, piece: str, *, is_over: bool) -> str:
        self.text += piece
        self.is_over = is_over
        return piece

    def outcome(self, token_ids: tuple[int, ...], result: GenerateResult | None) -> TextResult:
        """result: None if a stop string ended it."""
        if result is not None:
            position = result.history_length
        else:
            assert self._first is not None, "a stop string has a token at least"
            # A token within a character adds nothing to what is complete, and is not wholly before what comes.
            whole = max(reached for reached in self._reached if reached <= len(self.text))
            position = self._first + self._reached.index(whole)
        return TextResult(text=self.text, stop=self.stop, position=position, token_ids=token_ids, result=result)


class TextStream:
    """A Generate read as text: iterate it for pieces, or take the whole `result()`. It ends at a stop string."""

    def __init__(self, stream: GenerateStream, detokenizer: IncrementalDetokenizer) -> None:
        self._stream = stream
        self._detokenizer = detokenizer

    def __iter__(self) -> Iterator[str]:
        """The pieces of text, as they come. Once only."""
        self._stream._take()
        return self._pieces()

    def result(self) -> TextResult:
        """Read to the end and return everything. Raises the stream's error; StateError if it was cancelled."""
        while self._next() is not None:
            pass
        stream = self._stream
        return self._detokenizer.outcome(stream.token_ids, None if self._detokenizer.stop else stream._outcome())

    def cancel(self) -> None:
        """Stop generating. Safe from any thread, and after the end."""
        self._stream.cancel()

    def _pieces(self) -> Iterator[str]:
        try:
            while (piece := self._next()) is not None:
                if piece:
                    yield piece
        finally:
            self.cancel()

    def _next(self) -> str | None:
        """The text of the next token, perhaps none; None at the end."""
        if self._detokenizer.is_over:
            return None
        token = self._stream._next_token()
        piece = self._detokenizer.end() if token is None else self._detokenizer.push(token.token_id, token.position)
        if self._detokenizer.stop is not None:
            self.cancel()
        return piece


class AsyncTextStream:
    """As `TextStream`."""

    def __init__(self, stream: AsyncGenerateStream, detokenizer: IncrementalDetokenizer) -> None:
        self._stream = stream
        self._detokenizer = detokenizer

    def __aiter__(self) -> AsyncIterator[str]:
        """As `TextStream.__iter__`."""
        self._stream._take()
        return _Pieces(self)

    async def result(self) -> TextResult:
        """As `TextStream.result`."""
        while await self._next() is not None:
            pass
        stream = self._stream
        return self._detokenizer.outcome(stream.token_ids, None if self._detokenizer.stop else stream._outcome())

    def cancel(self) -> None:
        """As `TextStream.cancel`."""
        self._stream.cancel()

    async def _next(self) -> str | None:
        if self._detokenizer.is_over:
            return None
        token = await self._stream._next_token()
        piece = self._detokenizer.end() if token is None else self._detokenizer.push(token.token_id, token.position)
        if self._detokenizer.stop is not None:
            self.cancel()
        return piece


class _Pieces:
    """An iterator that cancels its stream when it is dropped: `break` stops the generation there and then."""

    def __init__(self, text: AsyncTextStream) -> None:
        self._text = text

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while (piece := await self._text._next()) is not None:
            if piece:
                return piece
        raise StopAsyncIteration

    def __del__(self) -> None:
        self._text.cancel()
