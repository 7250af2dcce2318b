"""How texts of a corpus begin: where a turn of the chat template begins, or with a piece of a document.

    user        the template up to where the user's words go: the model writes the question, too
    assistant   the template with a question in it: one of `OPENINGS`, or made of parts (`made_text.py`)
    text        some ids cut from a document, to be continued

A model asked to write the user's words gives questions of its own distribution, at no cost.
Source: Xu et al., Magpie, arXiv 2406.08464.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kv_cache_proposer.drafter_errors import DrafterError
from laboratory.conversations import ChatTokenizer, between_turns
from laboratory.training.made_text import questions
from laboratory.training.openings import OPENINGS

Speaker = Literal["user", "assistant", "text"]

CHAT = "chat"

_MARKER = "Kqzwxjvbm"
# Of all texts, where the model can chat; of the chats; of the answers and of the continued texts.
_CHATS, _OWN_QUESTIONS, _GREEDY_ANSWERS, _GREEDY_TEXTS = 0.7, 0.5, 0.5, 0.15
# Drawn beside the openings, made of parts: so many that few of a corpus begin alike, and are answered alike.
QUESTIONS, _QUESTIONS_SEED = 24_000, 0
_TEMPERATURES = (0.6, 0.7, 0.8, 1.0)
_SHORTEST_CUT, _LONGEST_CUT = 16, 96
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text's beginning. speaker: whose words come next.

    source: what it was made from, identified by its ids; texts of one source are all held out, or none is, in every
    corpus. temperature: of answers and of continued texts; the words of users are sampled at `user_temperature`.
    """

    kind: str
    token_ids: tuple[int, ...]
    speaker: Speaker
    source: str
    temperature: float
    user_temperature: float

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.source.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat template in token ids: up to the first user's words, with each question, and between two speakers.

    before_user, before_assistant: what follows the id that ended the other's turn.
    end_of_turn: that id.
    """

    opened: tuple[int, ...]
    asked: tuple[tuple[int, ...], ...]
    before_user: tuple[int, ...]
    before_assistant: tuple[int, ...]
    end_of_turn: int


def read_chat(tokenizer: ChatTokenizer, *, longest: int) -> Chat:
    """longest: ids of a question with the template around it; longer ones of those made of parts are left out.

    Raises ModelError if the template does not show where a speaker's words go.
    """
    before_user, before_assistant = (between_turns(tokenizer, role) for role in ("user", "assistant"))
    opened = tokenizer.apply_chat_template([{"role": "user", "content": _MARKER}], tokenize=False).split(_MARKER)[0]
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in dict.fromkeys([*OPENINGS, *islice(questions(_QUESTIONS_SEED), QUESTIONS)])
    ]
    encoded = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in asked]
    return Chat(
        opened=tuple(tokenizer.encode(opened, add_special_tokens=False)),
        asked=tuple(ids for place, ids in enumerate(encoded) if place < len(OPENINGS) or len(ids) <= longest),
        before_user=tuple(before_user[1:]),
        before_assistant=tuple(before_assistant[1:]),
        end_of_turn=before_user[0],
    )


@dataclass(frozen=True, slots=True)
class PromptSource:
    """All prompts a corpus begins texts with. documents: token ids by kind; chat: None for a model without template."""

    documents: Mapping[str, Sequence[Sequence[int]]]
    chat: Chat | None
    seed: int

    def __post_init__(self) -> None:
        if self.chat is None and not self.documents:
            raise DrafterError("the model has no chat template and no documents were given; nothing to begin with")
        for kind, documents in self.documents.items():
            if not any(len(ids) > _SHORTEST_CUT for ids in documents):
                raise DrafterError(f"no document of kind {kind!r} has more than {_SHORTEST_CUT} tokens")

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*([CHAT] if self.chat is not None else []), *sorted(self.documents))

    def batch(self, index: int, count: int) -> list[Prompt]:
        """The prompts of batch `index`: a function of it, the seed and what prompts are made from."""
        rng = random.Random(f"{self.seed}/{index}")
        return [self._draw(rng, f"{self.seed}/{index}/{number}") for number in range(count)]

    def _draw(self, rng: random.Random, name: str) -> Prompt:
        if self.chat is not None and (not self.documents or rng.random() < _CHATS):
            return self._chat(self.chat, rng, name)
        kind = rng.choice(sorted(self.documents))
        choices = [place for place, ids in enumerate(self.documents[kind]) if len(ids) > _SHORTEST_CUT]
        place = rng.choice(choices)
        ids = self.documents[kind][place]
        length = rng.randint(_SHORTEST_CUT, min(_LONGEST_CUT, len(ids)))
        start = rng.randint(0, len(ids) - length)
        temperature = 0.0 if rng.random() < _GREEDY_TEXTS else rng.choice(_TEMPERATURES)
        cut = tuple(ids[start : start + length])
        return Prompt(kind, cut, "text", _named(ids), temperature, user_temperature=1.0)

    def _chat(self, chat: Chat, rng: random.Random, name: str) -> Prompt:
        temperature = 0.0 if rng.random() < _GREEDY_ANSWERS else rng.choice(_TEMPERATURES)
        user_temperature = rng.choice(_TEMPERATURES)
        if rng.random() < _OWN_QUESTIONS:
            return Prompt(CHAT, chat.opened, "user", f"{CHAT}/{name}", temperature, user_temperature)
        asked = rng.choice(chat.asked)
        return Prompt(CHAT, asked, "assistant", _named(asked), temperature, user_temperature)


def _named(ids: Sequence[int]) -> str:
    """The same for the same ids, wherever they stand in a list."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
