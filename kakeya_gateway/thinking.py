"""How much a model may think: an effort or a budget of tokens, and the two Generates that keep to it as one stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kakeya import AsyncGenerateStream, AsyncSession, GenerateResult, StopReason, TokenDetail

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
# Tokens of reasoning; None: as many as the answer may have.
BUDGETS: Mapping[Effort, int | None] = {
    "none": 0, "minimal": 128, "low": 1024, "medium": 4096, "high": None, "xhigh": None,
}  # fmt: skip


class BudgetedStream:
    """Reasoning of `budget` tokens at most, then the answer. What the end of the reasoning lacks is put in, and is in
    the history as if it were generated. A `constraint` and `min_tokens` are of the answer alone."""

    def __init__(
        self,
        session: AsyncSession,
        most: int,
        budget: int,
        *,
        end: Sequence[int],
        behind: Sequence[int],
        is_within: Callable[[], bool],
        first: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """most: tokens in all. end: ids of the marker; behind: what a template has after it. is_within: do the tokens
        so far end in reasoning? first: options of the first Generate alone."""
        self._session, self._most, self._behind = session, most, list(behind)
        self._end, self._is_within, self._options = list(end), is_within, dict(options)
        ours = {name: value for name, value in options.items() if name not in ("constraint", "min_tokens")}
        self._stream = session.generate(min(budget, most), stop_sequences=[self._end], **ours, **first)
        self._before: list[int] = []  # ids before those of `_stream`
        self._result: GenerateResult | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self._before, *self._stream.token_ids)

    @property
    def is_finished(self) -> bool:
        return self._result is not None

    async def details(self) -> AsyncIterator[TokenDetail]:
        async for token in self._stream.details():
            yield token
        thinking = await self._stream.result()
        is_ended = thinking.stop_sequence is not None
        if not is_ended and thinking.stop_reason is not StopReason.MAX_TOKENS:
            self._result = thinking
            return
        missing = self._missing() if self._is_within() and not is_ended else []
        if len(self.token_ids) + len(missing) >= self._most:
            self._result = replace(thinking, stop_reason=StopReason.MAX_TOKENS)
            return
        if missing:
            await self._session.append(missing)
        self._before, at = [*self._stream.token_ids, *missing], thinking.history_length
        options = {**self._options, "seed": thinking.seed}
        self._stream = self._session.generate(self._most - len(self._before), **options)
        for place, token_id in enumerate(missing):
            yield TokenDetail(token_id=token_id, position=at + place, logprob=None)
        async for token in self._stream.details():
            yield token
        self._result = await self._stream.result()

    def _missing(self) -> list[int]:
        said, end = list(self._stream.token_ids), self._end
        begun = next((count for count in range(len(end) - 1, 0, -1) if said[-count:] == end[:count]), 0)
        return [*end[begun:], *self._behind]

    async def result(self) -> GenerateResult:
        """After the last of `details`."""
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        self._stream.cancel()


Stream = AsyncGenerateStream | BudgetedStream
