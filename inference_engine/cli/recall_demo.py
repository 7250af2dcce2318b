"""`kakeya demo --recall`: a fact is stated, leaves the window, and is asked for, under several strategies.

    fact | filler … filler … filler | question         the window holds the end of it

Every session gets the same ids. Sessions differ in the memory that they hold in between, and in whether they recall the
fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

if TYPE_CHECKING:
    from kakeya import Client, Strategy

KEY = "52817"
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
REPEATS = 36
QUESTION = "\n\nWhat is the pass key mentioned in the text above?"
OPENING = "The pass key is"
WINDOW = 64
_ANSWER_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled:
    """One session's answer, and the bytes that it held before the question."""

    strategy: str
    answer: str
    held_bytes: int
    restored_positions: int
    evicted_positions: int

    @property
    def is_right(self) -> bool:
        return KEY in self.answer


def strategies(has_latent: bool) -> list[Strategy]:
    from kakeya import Full, Restored, SinkWindow

    restored = Restored(window=WINDOW, source="latent" if has_latent else "recompute")
    return [Full(), SinkWindow(window=WINDOW), restored]


def recall(client: Client, tokenizer: Any, chosen: Sequence[Strategy]) -> list[Recalled]:
    """Append the fact and filler, then the question; one session after the other."""
    fact, question = _ids(tokenizer)
    found = []
    for strategy in chosen:
        with client.create_session(strategy, limit_tokens=len(fact) + len(question) + 2 * _ANSWER_TOKENS) as session:
            # Generating one token prefills the text; the question comes later, as in a conversation.
            session.append(fact)
            session.generate(1).result()
            held = session.info().kv_live_bytes
            session.append(question)
            result = session.generate(_ANSWER_TOKENS).result()
            found.append(
                Recalled(
                    strategy=str(session.strategy),
                    answer=tokenizer.decode(result.token_ids, skip_special_tokens=True).strip().split("\n")[0],
                    held_bytes=held,
                    restored_positions=result.restored_positions,
                    evicted_positions=result.evicted_positions,
                )
            )
    return found


def show(found: Sequence[Recalled], console: Console) -> None:
    fact = f"The pass key is {KEY}."
    console.print(f"{fact} Then {REPEATS} times the same five sentences, then the question.\n", markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Lines break between options of a strategy and not in one.
    strategies = [one.strategy.replace(",", ", ") for one in found]
    longest = max(len(word) for strategy in strategies for word in strategy.split())
    table.add_column("strategy", width=longest)
    table.add_column("answer", overflow="fold")
    for name in ("K/V held meanwhile", "restored", "evicted"):
        table.add_column(name, justify="right", overflow="fold")
    for one, strategy in zip(found, strategies, strict=True):
        mark = "✓" if one.is_right else "✗"
        numbers = (decimal(one.held_bytes), str(one.restored_positions), str(one.evicted_positions))
        table.add_row(strategy, f"{mark} {OPENING} {one.answer}", *numbers)
    console.print(table)


def _ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of the fact with filler, and those of the question with the opening of the answer."""
    from kakeya.tokenization import tokens_for_chat

    text = f"The pass key is {KEY}. Remember it. {KEY} is the pass key.{FILLER * REPEATS}{QUESTION}"
    whole = tokens_for_chat([{"role": "user", "content": text}], tokenizer)
    whole += tokenizer.encode(OPENING, add_special_tokens=False)
    last = len(tokenizer.encode(QUESTION + OPENING, add_special_tokens=False)) + 16
    return whole[:-last], whole[-last:]
