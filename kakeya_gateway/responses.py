"""`POST /v1/responses`, as OpenAI has it: the id of a response is a place in a session."""

from __future__ import annotations

from collections.abc import Iterable
from time import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kakeya.tools import ToolCallPart
from kakeya_gateway.bodies import Ask, Body, Format, Json, Parts, Refused, Sampled, Tool, as_chat
from kakeya_gateway.chat_completions import HARMLESS, logprobs
from kakeya_gateway.conversations import Answer, Conversations
from kakeya_gateway.thinking import BUDGETS, Effort
from kakeya_gateway.turns import Piece, Turn

ID, MESSAGE, CALL, REASONING = "resp_", "msg_", "fc_", "rs_"


class Item(Body):
    harmless = frozenset({"status", "phase", "id"})


class Message(Item):
    type: Literal["message"]
    role: str
    content: Parts


class Reference(Body):
    """In whose place comes what has this id in a stored response."""

    type: Literal["item_reference"]
    id: str


class Call(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class Output(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningText(Body):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class Reasoned(Item):
    harmless = Item.harmless | {"summary"}
    type: Literal["reasoning"]
    content: list[ReasoningText] = []


class Text(Body):
    format: Format | None = None


class Reasoning(Body):
    effort: Effort = "high"


class Choice(Body):
    type: Literal["function"]
    name: str


def _in_items(given: Any) -> Any:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        return given
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in items]


Items = list[Annotated[Message | Reference | Reasoned | Call | Output, Field(discriminator="type")]]


class Request(Sampled):
    harmless = HARMLESS - {"metadata"} | {"stream_options"}
    input: Annotated[Items, BeforeValidator(_in_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    text: Text = Text()
    reasoning: Reasoning = Reasoning()
    background: Literal[False] = False
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = []  # the former is none
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: int = 0
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | Choice = "auto"
    parallel_tool_calls: bool = True

    def ask(self, owner: Conversations) -> Ask:
        """owner: has the responses that are referred to."""
        messages: list[Any] = []
        if (after := self.previous_response_id) is not None:
            self._go_on_from(_answer(owner, after, "previous_response_id"))
        elif self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        messages += _messages(self.input, owner)
        others: Json = {"logprobs": "message.output_text.logprobs" in self.include, "top_logprobs": self.top_logprobs}
        options = self.options(self.text.format, "text.format", **others)
        choice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.name
        tools = [tool.definition() for tool in self.tools]
        name = None if after is None else after.removeprefix(ID)
        asked = (), tools, choice, self.parallel_tool_calls, name, self.store
        budget: Json = {"budget": BUDGETS[self.reasoning.effort], "budget_at": "reasoning.effort"}
        whole = as_chat(messages, is_whole=after is None, param="input")
        return Ask(self.model, whole, self.max_output_tokens, options, *asked, **budget)

    def _go_on_from(self, answer: Answer) -> None:
        """Have what its session begins with. Raises Refused for something else."""
        if answer.reply is None:
            return
        self.instructions = self.instructions or answer.reply["instructions"]
        for name, given in (("instructions", self.instructions), ("tools", [*map(_shown, self.tools)])):
            if given and given != answer.reply[name]:
                said = "differ from those of the previous response, with which its session begins; leave them out"
                raise Refused(said, param=name)


def _messages(items: Items, owner: Conversations) -> list[Json]:
    """As chat completions have them: calls belong to the message before them, reasoning to what is behind it."""
    messages: list[Json] = []
    for index, item in enumerate(items):
        match item:
            case Message():
                _say(messages, item.role, [part.as_chat() for part in item.content])
            case Reasoned():
                _think(messages, "".join(part.text for part in item.content))
            case Output():
                content = [part.as_chat() for part in item.output]
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case Call():
                _add_call(messages, item.call_id, item.name, item.arguments)
            case Reference():
                name, _, place = item.id.partition("_")[2].partition("_")
                said = _answer(owner, name, f"input[{index}].id").message or {}
                if item.id.startswith(REASONING):
                    _think(messages, said.get("reasoning_content", ""))
                elif place:
                    call = dict(enumerate(said.get("tool_calls", ()))).get(int(place) if place.isdecimal() else -1)
                    if call is None:
                        raise Refused(f"{item.id[:80]!r} is not known", param=f"input[{index}].id", status=404)
                    _add_call(messages, call["id"], call["function"]["name"], call["function"]["arguments"])
                else:
                    _say(messages, "assistant", said.get("content"))
    return messages


def _think(messages: list[Json], text: str) -> None:
    """Reasoning before an answer, or before calls."""
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _say(messages: list[Json], role: str, content: Any) -> None:
    is_behind = bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}
    if role == "assistant" and is_behind and messages[-1]["content"] is None:
        messages[-1]["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[Json], name: str, function: str, arguments: Any) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    call = {"id": name, "function": {"name": function, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


def _shown(tool: Tool) -> Json:
    return {"type": "function", "strict": True, **tool.definition()}


def _answer(owner: Conversations, name: str, param: str) -> Answer:
    """One that was kept. Raises Refused."""
    if (found := owner.answer(name.removeprefix(ID))) is None:
        said = f"{name[:80]!r} is not known: it was not stored, or its session is closed"
        raise Refused(said, param=param, status=404, code="previous_response_not_found")
    return found[0].answers[found[1]]


def stored(owner: Conversations, name: str) -> Json:
    """A response that was stored. Raises Refused."""
    answer = _answer(owner, name, "response_id")
    if answer.reply is None:
        said = "is an earlier gateway's: it can be continued by its id, and what was said is not known here"
        raise Refused(said, param="response_id", status=404)
    return answer.reply


class Reply:
    ending = ""

    def __init__(self, asked: Request, turn: Turn) -> None:
        self._asked = asked
        self._turn = turn
        self._created = time()
        self._count = 0  # of events
        self._items: list[Json] = []  # of a stream; the last one is under way

    def begin(self) -> Iterable[Json]:
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))

    def more(self, piece: Piece | ToolCallPart) -> Iterable[Json]:
        if isinstance(piece, Piece):
            kind = "reasoning" if piece.is_reasoning else "message"
            if not self._items or self._items[-1]["type"] != kind:
                item: Json = {"id": MESSAGE + self._turn.name, "type": kind, "role": "assistant"}
                if piece.is_reasoning:
                    item = {"id": REASONING + self._turn.name, "type": kind, "summary": []}
                yield from self._open({**item, "content": [_part(kind)]})
                yield self._event("response.content_part.added", **self._place, content_index=0, part=_part(kind))
            (part,) = self._items[-1]["content"]
            part["text"] += piece.text
            text: Json = {"content_index": 0, "delta": piece.text}
            if "logprobs" in part:
                text["logprobs"] = logprobs(self._turn, piece.tokens)
                part["logprobs"] += text["logprobs"]
            yield self._event(f"response.{part['type']}.delta", **self._place, **text)
        else:
            if not piece.arguments:
                item = {"id": f"{CALL}{self._turn.name}_{piece.index}", "type": "function_call", "call_id": piece.id}
                yield from self._open({**item, "name": piece.name, "arguments": ""})
            self._items[-1]["arguments"] += piece.arguments
            yield self._event("response.function_call_arguments.delta", **self._place, delta=piece.arguments)

    def end(self) -> Iterable[Json]:
        if not self._items:
            yield from self.more(Piece(""))
        yield from self._close()
        yield self._event(f"response.{self._status}", response=self._response(self._status, self._items))

    def _open(self, item: Json) -> Iterable[Json]:
        yield from self._close()
        item["status"] = "in_progress"
        self._items.append(item)
        shown = {**item, "content": []} if "content" in item else {**item}
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self) -> Iterable[Json]:
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = self._status
        if "content" in item:
            (part,) = item["content"]
            said = {"content_index": 0, **{name: part[name] for name in ("text", "logprobs") if name in part}}
            yield self._event(f"response.{part['type']}.done", **self._place, **said)
            yield self._event("response.content_part.done", **self._place, content_index=0, part=part)
        else:
            said = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._place, **said)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def whole(self) -> Json:
        return self._response(self._status, self._items)

    @property
    def _status(self) -> str:
        return "incomplete" if self._turn.is_cut else "completed"

    def _response(self, status: str, output: list[Json]) -> Json:
        asked, form, read, said = self._asked, self._asked.text.format, self._turn.start, self._turn.output_tokens
        usage: Json = {"input_tokens": read, "output_tokens": said, "total_tokens": read + said}
        usage |= {"input_tokens_details": {"cached_tokens": self._turn.cached_tokens}}
        usage |= {"output_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens}}
        echoed = {"model", "instructions", "previous_response_id", "metadata", "store", "max_output_tokens"}
        echoed |= {"temperature", "top_p", "truncation", "tool_choice", "parallel_tool_calls", "background"}
        return {
            **asked.model_dump(include=echoed),
            "id": ID + self._turn.name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)},
            "tools": [*map(_shown, asked.tools)],
            "usage": usage if output else None,
        }

    @property
    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}


def _part(kind: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
