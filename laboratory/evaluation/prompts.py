"""Prompts with planted facts, of an exact number of ids: frame, haystack, question and the opening of the answer.

    head | filler … fact … filler … fact … filler | question, end of the turn, opening of the answer
           ↑ cut where a sentence or a line ends    ↑ tail_at: nothing before this knows what is asked

Pieces are encoded one by one and their ids joined, so lengths come out exactly. A model with a chat template gets its
own frame; one without is a base model and gets bare text that it has only to go on with. Filler of kind `chat` is a
history with turns of its own: the facts are said in it, and the question is what the user says next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_engine.errors import InvalidArgument, ModelError
from laboratory.evaluation.haystack import CHAT, Texts
from laboratory.evaluation.tasks import Question

_SHORTEST_FILLER = 16
_MARKER = "Kqzwxjvbm Vhgtfyprd"  # no template trims, escapes or takes it for markup


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """From `fact_at` to `fact_end` lie the facts that the answer needs; the question begins at `tail_at`."""

    token_ids: tuple[int, ...]
    question: Question
    fact_at: int
    fact_end: int
    tail_at: int

    def is_out_of_reach(self, *, sink: int, window: int, segment_tokens: int) -> bool:
        """Whether no query from the question on may read any of the facts under sink + window.

        The question's first token sees the furthest back, from `window` before its segment on. What other entries of
        the window may hold of the fact is what the control is there to show.
        """
        segment_at = self.tail_at - self.tail_at % segment_tokens
        return self.fact_at >= sink and self.fact_end <= segment_at - window


class Prompts:
    """Builds prompts from the texts of one tokenizer or target."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._tokenizer = texts.tokenizer
        self._head, self._turn_end = _frame(texts.tokenizer)
        self._special = frozenset(texts.tokenizer.all_special_ids)
        self._ends: dict[int, bool] = {}

    def build(self, kind: str, length: int, question: Question, depths: Sequence[float], seed: int | str) -> Prompt:
        """`length` ids in all. Raises InvalidArgument if they do not hold the facts and some text around them."""
        gap = " " if kind == "looped" else "\n\n"
        facts = [self._encode(f"{gap}{fact}{gap.strip(' ')}") for fact in question.facts]
        head, tail = self._frame_of(kind, question)
        room = length - len(head) - len(tail) - sum(map(len, facts))
        if room < _SHORTEST_FILLER:
            raise InvalidArgument(
                "lengths", f"a prompt of this task needs at least {length - room + _SHORTEST_FILLER} ids, got {length}"
            )
        text = self._texts.filler(kind, room, seed)
        token_ids, done = list(head), 0
        places: list[tuple[int, int]] = []
        for fact, cut in zip(facts, self._cuts(text, depths), strict=True):
            token_ids += text[done:cut]
            places.append((len(token_ids), len(token_ids) + len(fact)))
            token_ids += fact
            done = cut
        token_ids += text[done:]
        tail_at = len(token_ids)
        token_ids += tail
        assert len(token_ids) == length
        return Prompt(
            token_ids=tuple(token_ids),
            question=question,
            fact_at=places[question.needed[0]][0],
            fact_end=places[question.needed[-1]][1],
            tail_at=tail_at,
        )

    def _frame_of(self, kind: str, question: Question) -> tuple[list[int], list[int]]:
        """What stands before the filler, and what follows it."""
        opening = question.opening if self._turn_end else f" {question.opening}"
        asking = f"{question.question}{self._turn_end}{opening}"
        if kind == CHAT:
            if not self._tokenizer.chat_template:
                raise InvalidArgument("kinds", f"{CHAT} needs a model with a chat template, and this one has none")

            from laboratory.conversations import between_turns

            return [], [*between_turns(self._tokenizer, "user"), *self._encode(asking)]
        return self._head, self._encode(f"\n\n{asking}")

    def _cuts(self, text: Sequence[int], depths: Sequence[float]) -> list[int]:
        """For each depth the nearest place where a sentence or a line ends, inside a turn."""
        places = [
            place + 1
            for place, token_id in enumerate(text)
            if self._is_end(token_id) and not (place and text[place - 1] in self._special)
        ]
        return [min(places or [0], key=lambda place: abs(place - depth * len(text))) for depth in depths]

    def _is_end(self, token_id: int) -> bool:
        if token_id not in self._ends:
            self._ends[token_id] = self._tokenizer.decode([token_id]).rstrip(" ").endswith((".", "\n"))
        return self._ends[token_id]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _frame(tokenizer: Any) -> tuple[list[int], str]:
    """The ids before the first word of the user, and the text between his last word and the assistant's first."""
    if not tokenizer.chat_template:
        with_special, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
        return list(with_special[: with_special.index(bare[0])]), ""
    messages = [{"role": "user", "content": _MARKER}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, marker, turn_end = rendered.partition(_MARKER)
    if not marker or not turn_end:
        raise ModelError("the chat template does not put the user's words between a head and an end of the turn")
    return list(tokenizer.encode(head, add_special_tokens=False)), turn_end
