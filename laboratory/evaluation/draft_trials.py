"""What drafters are tried on: prompts of every kind, with tokens chosen by two methods, and engines that draft.

Chats begin with a user's question in the model's own template; of other kinds a piece of text is continued. Nothing
of them was ever trained on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from inference_engine.decode.draft import Drafter
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.types import Sampling
from laboratory.evaluation.asking import GREEDY, Asked
from laboratory.evaluation.haystack import CHAT
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import text_passage
from laboratory.evaluation.self_talk import OPENINGS

PLAIN = "plain"
SHORTEST, LONGEST = 64, 256  # ids of the short prompts that are no questions


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where numbers belong: one drafter, or plain; a kind of text; how tokens were chosen; sessions side by side."""

    drafter: str
    kind: str
    method: str
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.drafter}, {self.kind}, {self.method}" + (f", batch {self.batch}" if self.batch > 1 else "")


@contextmanager
def drafting(target: Target, drafter: Drafter, draft_tokens: int) -> Iterator[Engine]:
    """A further engine on the target's weights, with that drafter. draft_tokens: 0 for as many as pay."""
    config = replace(target.engine.config, draft_tokens=draft_tokens)
    with Engine(target.forward, config, latent=target.latent, components=target.components, drafter=drafter) as engine:
        yield engine


def prompts(target: Target, arguments: argparse.Namespace) -> dict[tuple[str, str], list[Asked]]:
    """Prompts by kind and method of choosing tokens: as many as the largest part needs."""
    count = max(arguments.texts, arguments.timed_texts, *arguments.batches)
    found = {}
    for kind in arguments.kinds:
        texts = [_prompt(target, kind, number, arguments.length, f"long/{arguments.seed}") for number in range(count)]
        for method in _methods(arguments):
            found[kind, method] = _asked(texts, method, arguments)
    return found


def short_prompts(target: Target, arguments: argparse.Namespace) -> dict[str, list[Asked]]:
    """Prompts by method of choosing tokens, of all kinds in turn and of many lengths."""
    kinds, rng = arguments.kinds, random.Random(arguments.seed)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(arguments.identity_prompts)]
    texts = [
        _prompt(target, kinds[number % len(kinds)], number // len(kinds), length, f"short/{arguments.seed}")
        for number, length in enumerate(lengths)
    ]
    return {method: _asked(texts, method, arguments) for method in _methods(arguments)}


def _methods(arguments: argparse.Namespace) -> tuple[str, str]:
    return "greedy", f"at {arguments.temperature:g}"


def _asked(texts: Sequence[tuple[int, ...]], method: str, arguments: argparse.Namespace) -> list[Asked]:
    first = arguments.seed * 1000
    return [
        Asked(
            strategy=arguments.kept,
            token_ids=text,
            sampling=GREEDY if method == "greedy" else Sampling(temperature=arguments.temperature, seed=first + number),
        )
        for number, text in enumerate(texts)
    ]


def _prompt(target: Target, kind: str, number: int, length: int, seed: str) -> tuple[int, ...]:
    if kind == CHAT:
        return _question(target, number)
    return text_passage(target.texts, kind, length, 1, f"{seed}/{number}").prefix


def _question(target: Target, number: int) -> tuple[int, ...]:
    """Every opening as a question of its own, then each together with another one, up to the assistant's first word.

    Raises InvalidArgument for a model that cannot chat and for more questions than there are.
    """
    if not target.can_chat:
        raise InvalidArgument("kinds", f"{CHAT} needs a model with a chat template, and this one has none")
    many = len(OPENINGS)
    if number >= many**2:
        raise InvalidArgument("kinds", f"there are {many**2} questions of kind {CHAT}, and more are asked for")
    words = OPENINGS[number % many]
    if apart := number // many:
        words = f"{words}\n\n{OPENINGS[(number + apart) % many]}"
    message = {"role": "user", "content": words}
    text = target.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tuple(target.tokenizer.encode(text, add_special_tokens=False))
