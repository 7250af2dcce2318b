"""Haystacks: text of a kind, of an exact number of tokens, the same for the same (kind, count, seed).

    looped      five short sentences, over and over: the easy case
    prose       English documentation                         } half of the documents is there to calibrate on,
    code        Python                                        } haystacks are made of the other half
    chat        conversations that the model had with itself  } like what is calibrated on, of other openings
    tool_json   schemas, calls and results of tools           } and other tools
    cpp         C++ headers                                   } nothing was ever calibrated on
    polish      prose in Polish                               } anything like them

Documents come with the versions installed, and conversations with the model, so records hold `digest` of them. Which
half a document belongs to is a hash of its name.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle, islice
from typing import Any, Literal

from inference_engine.errors import InvalidArgument
from laboratory.evaluation import installed_texts
from laboratory.evaluation.installed_texts import Document
from laboratory.evaluation.self_talk import SelfTalk
from laboratory.evaluation.tool_json import exchanges

Half = Literal["calibration", "test"]

CHAT, LOOPED, TOOL_JSON = "chat", "looped", "tool_json"
# Of documents: those that something may be calibrated on, and those that nothing may.
_HALVED, _UNSEEN = ("prose", "code"), ("cpp", "polish")
KINDS = (LOOPED, *_HALVED, CHAT, TOOL_JSON, *_UNSEEN)
LOOP = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
_DIGESTED = 100  # exchanges that stand for all of them


class Texts:
    """Haystacks in the ids of one tokenizer; of kind `chat` only with a model that talks."""

    def __init__(self, tokenizer: Any, self_talk: SelfTalk | None = None) -> None:
        self.tokenizer = tokenizer
        self._self_talk = self_talk

    def filler(self, kind: str, count: int, seed: int | str) -> list[int]:
        """Exactly `count` ids of text of that kind, starting and ordered as `seed` says.

        A longer haystack begins with the shorter one of the same seed. Only `looped` repeats itself. Raises
        InvalidArgument for more than there is, and for `chat` with a model that cannot.
        """
        ids: list[int] = []
        for piece in self._pieces(kind, random.Random(f"{kind}/{seed}")):
            ids += piece
            if len(ids) >= count:
                return ids[:count]
        raise InvalidArgument(
            "lengths", f"there are {len(ids)} ids of kind {kind}, and {count} are asked for; texts are not repeated"
        )

    def digest(self, kind: str) -> str:
        """SHA-256 of what haystacks of this kind are cut from: equal digests, equal haystacks."""
        if kind == CHAT:
            texts = [",".join(map(str, talk)) for talk in self._talk().made()]
        elif kind == LOOPED:
            texts = list(LOOP)
        elif kind == TOOL_JSON:
            texts = list(islice(exchanges(random.Random(0)), _DIGESTED))
        else:
            texts = [part for one in documents(kind, "test") for part in (one.name, one.text)]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def _pieces(self, kind: str, rng: random.Random) -> Iterator[Sequence[int]]:
        if kind == CHAT:
            return self._talk().shuffled(rng)
        return (self.tokenizer.encode(text, add_special_tokens=False) for text in _stream(kind, rng))

    def _talk(self) -> SelfTalk:
        if self._self_talk is None:
            raise InvalidArgument("kind", f"{CHAT} is what a model says to itself, and there is none here")
        return self._self_talk


def calibration_texts(kind: str) -> tuple[str, ...]:
    """Documents that no haystack contains. There are none of most kinds."""
    return tuple(document.text for document in documents(kind, "calibration"))


@lru_cache(maxsize=8)
def documents(kind: str, half: Half) -> tuple[Document, ...]:
    """Sorted by name. Raises InvalidArgument for a kind that has no documents, or none to calibrate on."""
    if kind not in (_HALVED if half == "calibration" else (*_HALVED, *_UNSEEN)):
        raise InvalidArgument("kind", f"there are no documents of kind {kind!r} for {half}")
    if half == "calibration":
        return tuple(_without(_paragraphs(documents(kind, "test")), kind))
    return tuple(one for one in _all(kind) if kind in _UNSEEN or _half(one) == half)


def _without(tested: frozenset[str], kind: str) -> Iterator[Document]:
    """The other half. Files quote one another: paragraphs that haystacks have are nothing to calibrate on."""
    for one in _all(kind):
        if _half(one) == "calibration":
            kept = [part for part in one.text.split("\n\n") if part.strip() not in tested]
            if kept:
                yield Document(one.name, "\n\n".join(kept))


def _paragraphs(found: Sequence[Document]) -> frozenset[str]:
    return frozenset(part.strip() for one in found for part in one.text.split("\n\n")) - {""}


def _half(document: Document) -> Half:
    return "test" if hashlib.sha256(document.name.encode()).digest()[0] % 2 else "calibration"


@lru_cache(maxsize=len(installed_texts.KINDS))
def _all(kind: str) -> tuple[Document, ...]:
    return installed_texts.collect(kind)


def _stream(kind: str, rng: random.Random) -> Iterator[str]:
    """Text in pieces; of documents each once."""
    if kind == LOOPED:
        first = rng.randrange(len(LOOP))
        return cycle((*LOOP[first:], *LOOP[:first]))
    if kind == TOOL_JSON:
        return exchanges(rng)
    return _shuffled(documents(kind, "test"), rng)


def _shuffled(found: Sequence[Document], rng: random.Random) -> Iterator[str]:
    order = list(found)
    rng.shuffle(order)
    # The first one is entered at some paragraph, so that two seeds differ even where documents are few.
    paragraphs = order[0].text.split("\n\n")
    first = rng.randrange(len(paragraphs))
    yield "\n\n".join(paragraphs[first:]) + "\n\n"
    for document in order[1:]:
        yield document.text + "\n\n"
    yield "".join(f"{paragraph}\n\n" for paragraph in paragraphs[:first])
