"""Passages: texts cut in two, the first part appended, the second forced and read as if the model had generated it.

    append `prefix`, then force `forced`     … x x x x | y y y y y y

Forced tokens are marked as generated, so strategies that let these read less show what that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity, Overloaded
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation.haystack import CHAT, Texts
from laboratory.evaluation.models import Target
from laboratory.evaluation.sessions import append_all, opened


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A text cut in two: `prefix` is appended, `forced` is scored. `kind` says what it is: prose, code, …"""

    kind: str
    prefix: tuple[int, ...]
    forced: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prefix or not self.forced:
            raise ValueError(
                f"a passage needs tokens to append and to force, got {len(self.prefix)} and {len(self.forced)}"
            )


def text_passage(texts: Texts, kind: str, length: int, count: int, seed: str) -> Passage:
    """A passage of that kind of text, begun with the ids that the tokenizer itself would begin a text with."""
    opening = [] if kind == CHAT else _opening(texts.tokenizer)  # a conversation begins as its template says
    return cut(kind, opening + texts.filler(kind, length + count, seed), length, count)


def cut(kind: str, token_ids: Sequence[int], length: int, count: int) -> Passage:
    """The first `length` tokens as prefix and the next `count` to be forced. Raises ValueError if there are fewer."""
    if len(token_ids) < length + count:
        raise ValueError(f"{kind}: {length} + {count} tokens are wanted, the text has {len(token_ids)}")
    return Passage(kind=kind, prefix=tuple(token_ids[:length]), forced=tuple(token_ids[length : length + count]))


def describe(target: Target, strategies: Sequence[KVStrategy], kinds: Sequence[str], **numbers: Any) -> dict[str, Any]:
    """What a record's config says of strategies on passages; `numbers` say how long and how many these are."""
    return {
        **target.describe(),
        "strategies": [str(one) for one in strategies],
        "kinds": list(kinds),
        **numbers,
        "texts_sha256": {kind: target.texts.digest(kind) for kind in kinds},
    }


@contextmanager
def forced(
    engine: Engine, strategy: KVStrategy, passage: Passage, on_logits: Callable[[int, Tensor], None]
) -> Iterator[str]:
    """A session that has been given the passage, `on_logits` receiving every forced token's logits."""
    with opened(engine, strategy, len(passage.prefix) + len(passage.forced)) as session:
        append_all(engine, session, passage.prefix)
        for _ in engine.score(session, passage.forced, on_logits):
            pass
        yield session


def force(engine: Engine, strategy: KVStrategy, passage: Passage, on_logits: Callable[[int, Tensor], None]) -> None:
    """Append and force the passage on a session of its own, `on_logits` receiving every forced token's logits."""
    with forced(engine, strategy, passage, on_logits):
        pass


def force_all(
    engine: Engine, passage: Passage, wanted: Sequence[tuple[KVStrategy, Callable[[int, Tensor], None]]]
) -> dict[int, str]:
    """Force the passage on a session of each strategy, side by side, as many at a time as memory and queue hold.

    Returns why some have none, by their place in `wanted`. What any failed with otherwise is raised.
    """
    length = len(passage.prefix) + len(passage.forced)
    refused: dict[int, str] = {}
    waiting = list(enumerate(wanted))
    while waiting:
        with ExitStack() as sessions:
            running = []
            while waiting:
                number, (strategy, on_logits) = waiting[0]
                try:
                    session = sessions.enter_context(opened(engine, strategy, length))
                    append_all(engine, session, passage.prefix)
                    running.append(engine.score(session, passage.forced, on_logits))
                except InvalidArgument as refusal:
                    refused[number] = refusal.message
                except (NoCapacity, Overloaded) as refusal:
                    if running:
                        break  # it has another try once these have ended
                    if isinstance(refusal, Overloaded):
                        raise
                    refused[number] = refusal.message
                waiting.pop(0)
            for one in running:
                for _ in one:
                    pass
    return refused


def _opening(tokenizer: Any) -> list[int]:
    plain, begun = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    return list(begun[: begun.index(plain[0])])
