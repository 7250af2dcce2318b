"""One turn: the answer of a conversation as it comes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kakeya import Progress, StopReason, TokenDetail, ToolCallError
from kakeya.tokenization import ReplyText, StopStrings
from kakeya.tools import TextPart, ToolCall, ToolCallPart, Tools
from kakeya_gateway.bodies import Ask, Json, Refused
from kakeya_gateway.conversations import Answer, Conversation, Conversations, digests
from kakeya_gateway.thinking import BudgetedStream, Stream


class Piece(NamedTuple):
    """Text that can be shown at once. tokens: those that came with it, if log-probabilities were asked for; of what is
    said, not of reasoning."""

    text: str
    tokens: Sequence[TokenDetail] = ()
    is_reasoning: bool = False


def require_model(name: str, owner: Conversations) -> None:
    """Raises Refused for another than the server's."""
    if name != (served := owner.info.model_id):
        said = f"this server has {served!r}, not {name[:80]!r}"
        raise Refused(said, param="model", status=404, code="model_not_found")


_Read = TextPart | ToolCallPart | ToolCall


class _Reader:
    """Reads an answer without tools, as a `ToolCallParser` does one with them."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._text = ReplyText(decode)

    def feed(self, token_ids: Iterable[int]) -> list[TextPart]:
        return [TextPart(piece) for each in token_ids if (piece := self._text.push(each))]

    def finish(self) -> list[TextPart]:
        return []


class Turn:
    """An answer under way. Leaving its `with` ends it and lets the session go; what was generated stays in it."""

    def __init__(
        self, ask: Ask, owner: Conversations, conversation: Conversation, digest: bytes, tools: Tools | None
    ) -> None:
        self.owner = owner
        self.start = len(conversation.ids)
        self.name = f"{conversation.name}{self.start:08x}"  # of this answer, among all of its key
        self.text = ""
        self.reasoning = ""
        self.reasoning_tokens = 0
        self.tokens: list[TokenDetail] = []
        self.calls: list[ToolCall] = []
        self.cached_tokens = 0
        self.is_cut = False  # by a limit of length
        self._is_cut_within_call = False
        self._ask = ask
        self._conversation = conversation
        self._digest = digest
        self._reached = [0]  # characters that were read after each number of tokens
        self._reader = _Reader(owner.texts.decode) if tools is None else tools.parser()
        self._thoughts = owner.texts.thoughts(conversation.ids)
        self._stops = StopStrings(ask.stops)
        self._least = ask.options.get("min_tokens", 0)
        self._ends = frozenset(owner.info.eos_token_ids) if tools is None else frozenset[int]()
        most = owner.info.max_generate_tokens
        if (limit := conversation.session.limit_tokens) is not None:
            most = max(1, min(most, limit - self.start))
        options = dict(ask.options)
        if tools is not None and options["constraint"] is None:
            options["constraint"] = tools.constraint(ask.choice, parallel=ask.is_parallel)
        most = most if ask.max_tokens is None else ask.max_tokens
        first: Json = {"on_progress": self._progressed, "expected_history_length": self.start}
        self._stream: Stream
        if self._thoughts.is_within and (ask.budget or ask.options["constraint"] is not None):
            end, behind = owner.texts.thought_end()
            parts: Json = {"end": end, "behind": behind, "is_within": lambda: self._thoughts.is_within}
            session = conversation.session
            self._stream = BudgetedStream(session, most, ask.budget or most, **parts, first=first, options=options)
        else:
            self._stream = conversation.session.generate(most, **first, **options)

    @classmethod
    async def begin(cls, ask: Ask, owner: Conversations) -> Turn:
        """Find or open the session, append what is new, and generate. Raises the SDK's errors, and Refused."""
        require_model(ask.model, owner)
        if not ask.messages or ask.messages[-1]["role"] == "assistant":
            raise Refused("must end with one that is not the assistant's, to be answered", param="messages")
        if not ask.tools and ask.choice not in ("auto", "none"):
            raise Refused("needs tools", param="tool_choice")
        tools = await owner.texts.tools(ask.tools)
        if tools is not None and ask.choice != "none" and ask.options["constraint"] is not None:
            raise Refused("may be called, so the output cannot be held to a format", param="tools")
        if ask.budget and not owner.texts.thinks:
            raise Refused("the model's chat template knows no reasoning", param=ask.budget_at)
        if ask.budget and tools is not None and ask.choice not in ("auto", "none"):
            raise Refused("cannot be limited where a tool has to be called", param=ask.budget_at)
        ids, digest = await owner.ids_of(ask, tools)
        asked = len(ids)
        if ask.budget is not None:
            ids.extend(owner.texts.thought_begun(ids, is_empty=not ask.budget))
        conversation = await owner.open(ids, digest)
        conversation.said[digest] = asked, asked  # it may be asked again with another budget
        try:
            return cls(ask, owner, conversation, digest, tools)
        except BaseException:
            conversation.end((), is_whole=True)
            raise

    @property
    def output_tokens(self) -> int:
        return len(self._stream.token_ids)

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.matched

    @property
    def message(self) -> Json:
        """What was said, as a message."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
        ]
        said = {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}
        return said | ({"reasoning_content": self.reasoning} if self.reasoning else {})

    async def pieces(self) -> AsyncIterator[Piece | ToolCallPart]:
        """Raises the SDK's errors."""
        async for token in self._stream.details():
            is_end = token.token_id in self._ends
            parts = () if is_end else self._reader.feed([token.token_id])
            tokens = () if token.logprob is None or is_end else (token,)
            for piece in self._read(parts, tokens):
                yield piece
            if self.stop is not None:
                return
        result = await self._stream.result()
        self.is_cut = result.stop_reason in (StopReason.MAX_TOKENS, StopReason.TRUNCATED)
        try:
            for piece in self._read(self._reader.finish(), ()):
                yield piece
        except ToolCallError:
            self._is_cut_within_call = True
        for is_reasoning, rest in self._thoughts.end():
            yield self._shown(rest, (), is_reasoning=is_reasoning)
        if rest := self._stops.end():
            yield self._shown(rest, ())

    def _read(self, parts: Iterable[_Read], tokens: Sequence[TokenDetail]) -> Iterable[Piece | ToolCallPart]:
        text, reached = "", self._reached[-1]
        for part in parts:
            match part:
                case TextPart():
                    reached += len(part.text)
                    for is_reasoning, said in self._thoughts.push(part.text):
                        if is_reasoning:
                            yield self._shown(said, (), is_reasoning=True)
                        else:
                            text += self._stops.push(said, may_stop=self.output_tokens >= self._least)
                case ToolCallPart():
                    yield part
                case ToolCall():
                    self.calls.append(part)
        self._reached.append(reached)
        self.reasoning_tokens += self._thoughts.is_within
        tokens = () if self._thoughts.is_within else tokens
        if text or tokens:
            yield self._shown(text, tokens)

    def _shown(self, text: str, tokens: Sequence[TokenDetail], *, is_reasoning: bool = False) -> Piece:
        if is_reasoning:
            self.reasoning += text
        else:
            self.text += text
            self.tokens += tokens
        return Piece(text, tokens, is_reasoning)

    def keep(self, reply: Json) -> None:
        """After the end: what was replied is there by its name from now on, if that was asked for."""
        if self._ask.is_kept and self._is_whole:
            end = self.start + self.output_tokens
            answer = Answer(end=end, digest=self._answered, message=self.message, reply=reply)
            self._conversation.keep(self.start, answer)

    @property
    def _is_whole(self) -> bool:
        return self._stream.is_finished and not self._is_cut_within_call

    @property
    def _answered(self) -> bytes:
        return digests(self._digest, [self.message])[-1]

    def _progressed(self, progress: Progress) -> None:
        self.cached_tokens = self.start - progress.total_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """What clients can send back as the answer is known: all of it, or what was shown of one that ended early."""
        self._stream.cancel()
        ids, is_known = self._stream.token_ids, self._is_whole
        if not is_known and not self.calls and not self.reasoning_tokens:
            count = bisect_left(self._reached, len(self.text))
            if is_known := count < len(self._reached) and self._reached[count] == len(self.text):
                ids = ids[:count]
        place = self._conversation.end(ids, is_whole=self._is_whole)
        if is_known:
            self._conversation.said[self._answered] = place
