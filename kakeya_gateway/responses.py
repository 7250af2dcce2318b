"""`POST /v1/responses`, as OpenAI has it: the id of a response is a place in a session."""

from __future__ import annotations

from collections.abc import Iterable
from time import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kakeya.tokenization import from_openai_messages
from kakeya_gateway.bodies import Ask, Body, Format, Json, Parts, Refused, Sampled
from kakeya_gateway.chat_completions import HARMLESS, None_, Zero
from kakeya_gateway.conversations import Conversations
from kakeya_gateway.turns import Piece, Turn

ID, ITEM = "resp_", "msg_"


class Item(Body):
    """A message, or the id of one of a stored response, in whose place the message comes."""

    harmless = frozenset({"status", "phase"})
    type: Literal["message", "item_reference"] = "message"
    role: str = ""
    content: Parts = []
    id: str = ""


class Text(Body):
    format: Format | None = None


class Reasoning(Body):
    effort: Literal["none"] = "none"


def _in_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class Request(Sampled):
    harmless = HARMLESS - {"metadata"} | {"stream_options"}
    input: Annotated[list[Item], BeforeValidator(_in_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    text: Text = Text()
    reasoning: Reasoning = Reasoning()
    background: Literal[False] = False
    include: list[Literal["reasoning.encrypted_content"]] = []  # there is none
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: Zero = 0
    tools: None_ = []
    tool_choice: Literal["auto", "none"] = "auto"

    def ask(self, owner: Conversations) -> Ask:
        """owner: has the responses that are referred to."""
        messages: list[Any] = []
        if (after := self.previous_response_id) is not None:
            begun = stored(owner, after, "previous_response_id").get("instructions", self.instructions)
            if self.instructions not in (None, begun):
                said = "differ from those that the previous response began with, and a session's history stays"
                raise Refused(said, param="instructions")
            self.instructions = begun
        elif self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(self.input):
            if item.type == "item_reference":
                found = stored(owner, ID + item.id.removeprefix(ITEM), f"input[{index}].id")
                messages.append({"role": "assistant", "content": found["output"][0]["content"][0]["text"]})
            else:
                messages.append({"role": item.role, "content": [part.as_chat() for part in item.content]})
        options = self.options(self.text.format, "text.format")
        name = None if after is None else after.removeprefix(ID)
        return Ask(
            self.model, from_openai_messages(messages), self.max_output_tokens, options, after=name, is_kept=self.store
        )


def stored(owner: Conversations, name: str, param: str = "response_id") -> Json:
    """A response that was stored. Raises Refused."""
    if (found := owner.answer(name.removeprefix(ID))) is None:
        said = f"{name[:80]!r} is not known: it was not stored, or its session is closed"
        raise Refused(said, param=param, status=404, code="previous_response_not_found")
    conversation, start = found
    if start not in conversation.replies:  # an earlier gateway's
        said = owner.texts.decode(conversation.ids[start : conversation.answers[start]])
        content = [{"type": "output_text", "text": said, "annotations": []}]
        item = {"id": ITEM + name.removeprefix(ID), "type": "message", "role": "assistant", "status": "completed"}
        head = {"id": name, "object": "response", "created_at": 0, "status": "completed", "model": owner.info.model_id}
        return {**head, "output": [{**item, "content": content}], "tools": [], "tool_choice": "auto"}
    return conversation.replies[start]


class Reply:
    ending = ""

    def __init__(self, asked: Request, turn: Turn) -> None:
        self._asked = asked
        self._turn = turn
        self._created = time()
        self._count = 0

    def begin(self) -> Iterable[Json]:
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", **self._place, part=self._part(""))

    def more(self, piece: Piece) -> Iterable[Json]:
        yield self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def end(self) -> Iterable[Json]:
        text, whole = self._turn.text, self.whole()
        yield self._event("response.output_text.done", **self._place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=self._part(text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def whole(self) -> Json:
        status = "incomplete" if self._turn.is_cut else "completed"
        return self._response(status, [self._item(status, [self._part(self._turn.text)])])

    def _response(self, status: str, output: list[Json]) -> Json:
        read, written = self._turn.start, self._turn.output_tokens
        usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        usage |= {"input_tokens_details": {"cached_tokens": self._turn.cached_tokens}}  # type: ignore[dict-item]
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}}  # type: ignore[dict-item]
        echoed = {"model", "instructions", "previous_response_id", "metadata", "store", "max_output_tokens"}
        echoed |= {"temperature", "top_p", "truncation", "tools", "tool_choice", "background"}
        form = self._asked.text.format
        return {
            **self._asked.model_dump(include=echoed, by_alias=True),
            "id": ID + self._turn.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)},
            "usage": usage if output else None,
        }

    def _item(self, status: str, content: list[Json]) -> Json:
        item = {"id": ITEM + self._turn.name, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    @property
    def _place(self) -> Json:
        return {"item_id": ITEM + self._turn.name, "output_index": 0, "content_index": 0}

    @staticmethod
    def _part(text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}
