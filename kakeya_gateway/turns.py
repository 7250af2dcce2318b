"""One turn: the answer of a conversation as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kakeya import Progress, StopReason
from kakeya_gateway.bodies import Ask, Refused
from kakeya_gateway.conversations import Conversation, Conversations, digests
from kakeya_gateway.texts import Pieces


class Piece(NamedTuple):
    """What can be shown at once. tokens: id and log-probability of each, if they were asked for."""

    text: str
    tokens: Sequence[tuple[int, float]]


class Turn:
    """An answer under way. Leaving its `with` ends it and lets the session go; what was generated stays in it."""

    def __init__(self, ask: Ask, owner: Conversations, conversation: Conversation, digest: bytes) -> None:
        self.ask = ask
        self.owner = owner
        self.start = len(conversation.ids)
        self.name = f"{conversation.name}{self.start:08x}"  # of this answer, among all of its key
        self.text = ""
        self.tokens: list[tuple[int, float]] = []
        self.cached_tokens = 0
        self.is_cut = False  # by a limit of length
        self._conversation = conversation
        self._digest = digest
        self._pieces = Pieces(owner.texts, ask.stops)
        most = owner.info.max_generate_tokens
        if (limit := conversation.session.limit_tokens) is not None:
            most = max(1, min(most, limit - self.start))
        self._stream = conversation.session.generate(
            most if ask.max_tokens is None else ask.max_tokens,
            on_progress=self._progressed,
            expected_history_length=self.start,
            **ask.options,
        )

    @classmethod
    async def begin(cls, ask: Ask, owner: Conversations) -> Turn:
        """Find or open the session, append what is new, and generate. Raises the SDK's errors, and Refused."""
        if ask.model != (served := owner.info.model_id):
            said = f"this server has {served!r}, not {ask.model[:80]!r}"
            raise Refused(said, param="model", status=404, code="model_not_found")
        if not ask.messages or ask.messages[-1]["role"] == "assistant":
            raise Refused("must end with one that is not the assistant's, to be answered", param="messages")
        ids, digest = await owner.ids_of(ask.messages, ask.after)
        conversation = await owner.open(ids, digest)
        try:
            return cls(ask, owner, conversation, digest)
        except BaseException:
            conversation.end((), None, is_whole=True, is_kept=False)
            raise

    @property
    def output_tokens(self) -> int:
        return len(self._stream.token_ids)

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._pieces.stop

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises the SDK's errors."""
        async for token in self._stream.details():
            is_end = token.token_id in self.owner.info.eos_token_ids
            shown = "" if is_end else self._pieces.push(token.token_id)
            tokens = () if token.logprob is None or is_end else ((token.token_id, token.logprob),)
            if shown or tokens:
                yield self._shown(shown, tokens)
            if self.stop is not None:
                return
        result = await self._stream.result()
        self.is_cut = result.stop_reason in (StopReason.MAX_TOKENS, StopReason.TRUNCATED)
        if rest := self._pieces.end():
            yield self._shown(rest, ())

    def keep(self, reply: dict[str, object]) -> None:
        if self.ask.is_kept:
            self._conversation.replies[self.start] = reply

    def _shown(self, text: str, tokens: Sequence[tuple[int, float]]) -> Piece:
        self.text += text
        self.tokens += tokens
        return Piece(text, tokens)

    def _progressed(self, progress: Progress) -> None:
        self.cached_tokens = self.start - progress.total_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stream.cancel()
        is_whole = self._stream.is_finished
        digest = digests(self._digest, [{"role": "assistant", "content": self.text}])[-1] if is_whole else None
        self._conversation.end(self._stream.token_ids, digest, is_whole=is_whole, is_kept=self.ask.is_kept)
