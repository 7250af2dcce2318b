"""What a model says when it talks with itself, to be tested on: openings that no calibration has.

Conversations come in rounds, made when they are first asked for and then kept. They are the same for the same model, on
the same machine; elsewhere rounding may turn a sampled word.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from inference_engine.errors import InvalidArgument

if TYPE_CHECKING:
    from inference_engine.engine import Engine

OPENINGS = (
    "I moved into a flat with a balcony that faces north. What can I grow there?",
    "Write a letter to my landlord asking for the heating to be repaired.",
    "Why does bread go stale faster in the fridge?",
    "Write a SQL query that finds customers who ordered in March but not in April.",
    "Help me prepare for a job interview at a small museum.",
    "Give me three ideas for a birthday party for a seven-year-old, with a list of what to buy.",
    "My cat wakes me at five every morning. How can I stop that?",
    "Describe how a suspension bridge carries its load, for someone without mathematics.",
    "Turn this into a table: Anna is 31 and lives in Lyon, Ben is 27 and lives in Porto, Chloe is 45 and in Graz.",
    "What should I pack for four days of walking in the mountains in October?",
    "Explain the difference between a list and a tuple, with short examples.",
    "Tell a story about a clockmaker who repairs a clock that runs backwards.",
    "Come funziona una macchina per il caffè espresso?",
    "How do vaccines train the immune system?",
    "I have 240 euros for three weeks. Make me a spending plan.",
    "Write a class in JavaScript for a shopping basket, then explain each method.",
)
CONVERSATIONS = 8  # a round
_TURNS, _TURN_TOKENS, TOKENS = 12, 256, 1536
_TEMPERATURE = 0.7  # as models are commonly used; a small one strays further the hotter it runs
_FIRST_SEED = 2**32  # far from those of calibration


class SelfTalk:
    """Conversations of the model that `engine` runs."""

    def __init__(
        self, engine: Engine, tokenizer: Any, stop_ids: Sequence[int], *, conversations: int = CONVERSATIONS
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._conversations = conversations
        self._rounds: list[list[list[int]]] = []

    def shuffled(self, rng: random.Random) -> Iterator[list[int]]:
        """Token ids of conversation after conversation, without end and without repeating one."""
        for number in count():
            order = list(self._round(number))
            rng.shuffle(order)
            yield from order

    def made(self) -> list[list[int]]:
        """All conversations so far, at least a round of them."""
        self._round(0)
        return [talk for one in self._rounds for talk in one]

    def _round(self, number: int) -> list[list[int]]:
        """Raises InvalidArgument if the model has no chat template."""
        while len(self._rounds) <= number:
            self._rounds.append(self._make(len(self._rounds)))
        return self._rounds[number]

    def _make(self, number: int) -> list[list[int]]:
        if not self._tokenizer.chat_template:
            raise InvalidArgument("kind", "chat needs a model with a chat template, and this one has none")
        from laboratory.conversations import Opening, converse  # and with it torch, which a target imports late

        first = number * self._conversations
        openings = [
            Opening(words=OPENINGS[place % len(OPENINGS)], seed=_FIRST_SEED + place)
            for place in range(first, first + self._conversations)
        ]
        return converse(
            self._engine,
            self._tokenizer,
            openings,
            stop_ids=self._stop_ids,
            turns=_TURNS,
            turn_tokens=_TURN_TOKENS,
            tokens=min(TOKENS, self._engine.info().facts.trained_positions),
            temperature=_TEMPERATURE,
        )
