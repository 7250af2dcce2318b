"""A part of `kakeya demo`: the model calls a tool and says what came of it, in a session of its own.

tools, question ▸ the call, by a constraint ▸ the function runs ▸ its result is appended ▸ the answer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from inference_engine.cli.conversation import Conversation, Turn
    from kakeya.tools import Tools

QUESTION = "How many of tea are in stock?"
_STOCK = {"tea": 12, "honey": 3}
_CALL_TOKENS = 128  # most of a call; it ends by itself


def in_stock(item: Annotated[str, "what it is, one word", {"maxLength": 12}]) -> str:
    """How many of an item are in stock."""
    return f"{_STOCK.get(item.lower(), 0)} of {item}"


def tools_for(tokenizer: Any) -> Tools:
    """In the model's own format; where its template has none, in the one that most models have seen."""
    from kakeya import ToolFormatUnknown
    from kakeya.tools import Tools

    try:
        return Tools([in_stock], tokenizer)
    except ToolFormatUnknown:
        return Tools([in_stock], tokenizer, format="hermes")


def hold(
    conversation: Conversation,
    tokenizer: Any,
    *,
    system: str,
    max_tokens: int,
    turn_of: Callable[..., Turn],
) -> list[Turn]:
    """The turns of the call and of the answer. turn_of: holds a turn of the conversation, given ids, and shows it."""
    tools = tools_for(tokenizer)
    asked = tools.tokens_for_chat([{"role": "system", "content": system}, {"role": "user", "content": QUESTION}])
    constraint = tools.constraint("required", parallel=False)
    called = turn_of(conversation, QUESTION, asked, max_tokens=_CALL_TOKENS, constraint=constraint)
    (call,) = tools.read(called.generated_ids).calls
    result = tools.call(call)
    given = tools.tokens_for_next_turn([result], after=called.generated_ids)
    answered = turn_of(conversation, f"{call.name} → {result.content}", given, max_tokens=max_tokens)
    return [called, answered]
