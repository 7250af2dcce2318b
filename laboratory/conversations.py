"""Conversations that a model has with itself: text of the kind that sessions hold, in the model's own distribution.

    opening → answer → the model's own idea of what the user says next → answer → …

The model writes the user's words too: it generates where the chat template has the user's turn. Every turn is sampled
under full attention; formatting and end-of-turn ids are part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inference_engine.engine import Engine
from inference_engine.engine.generation import Generation
from inference_engine.errors import ModelError
from inference_engine.kv.strategies.full import Full
from inference_engine.types import GenerateParams, Sampling, TokenCommitted

_MARKER = "Kqzwxjvbm"  # no template trims, escapes or takes it for markup
_TOP_P = 0.95


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer: transformers' own have it."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How a conversation begins, and the seed that all its turns are sampled with."""

    words: str
    seed: int


@dataclass(slots=True)
class _Talk:
    session_id: str
    seed: int
    token_ids: list[int]
    is_over: bool = False


def converse(
    engine: Engine,
    tokenizer: ChatTokenizer,
    openings: Sequence[Opening],
    *,
    stop_ids: Sequence[int],
    turns: int,
    turn_tokens: int,
    tokens: int,
    temperature: float = 0.9,
) -> list[list[int]]:
    """Token ids of a conversation for each opening, all held at the same time.

    Each has at most `tokens` ids and ends after `turns` turns of at most `turn_tokens`. Raises ModelError if the
    tokenizer's template does not show where a speaker's words go, NoCapacity if they do not fit side by side,
    HistoryLimit if an opening alone is longer.
    """
    before_user, before_assistant = (between_turns(tokenizer, role) for role in ("user", "assistant"))
    talks: list[_Talk] = []
    try:
        for opening in openings:
            session = engine.create_session(
                strategy=Full(), eos_token_ids=tuple(stop_ids), limit_tokens=tokens, guaranteed=True
            )
            talks.append(_Talk(session.session_id, opening.seed, []))
            _say(engine, talks[-1], _opened(tokenizer, opening.words))
        for turn in range(turns):
            between = before_user if turn % 2 == 0 else before_assistant
            for talk, generation in _speak(engine, talks, turn_tokens, tokens, temperature):
                talk.token_ids += [event.token_id for event in generation if isinstance(event, TokenCommitted)]
                has_ended = talk.token_ids[-1] in stop_ids
                _hand_over(engine, talk, between[1:] if has_ended else between, tokens)
    finally:
        for talk in talks:
            engine.close_session(talk.session_id)
    return [talk.token_ids for talk in talks]


def between_turns(tokenizer: ChatTokenizer, role: str) -> list[int]:
    """Ids from the end of the other speaker's words to where the words of `role` begin.

    Raises ModelError if the tokenizer's template does not show them.
    """
    other = "assistant" if role == "user" else "user"
    talk = [{"role": "user", "content": "Hello"}] if other == "assistant" else []
    talk += [{"role": other, "content": _MARKER}, {"role": role, "content": _MARKER}]
    rendered: str = tokenizer.apply_chat_template(talk, tokenize=False)
    parts = rendered.split(_MARKER)
    if len(parts) != 3:
        raise ModelError("the chat template does not show where a speaker's words go")
    return list(tokenizer.encode(parts[1], add_special_tokens=False))


def _opened(tokenizer: ChatTokenizer, words: str) -> list[int]:
    """The conversation up to where the assistant's first answer begins."""
    message = {"role": "user", "content": words}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _speak(
    engine: Engine, talks: Sequence[_Talk], turn_tokens: int, tokens: int, temperature: float
) -> list[tuple[_Talk, Generation]]:
    """Let every conversation with room left take a turn, all in one batch."""
    running = []
    for talk in talks:
        room = tokens - len(talk.token_ids)
        if room and not talk.is_over:
            sampling = Sampling(temperature=temperature, top_p=_TOP_P, seed=talk.seed)
            params = GenerateParams(max_tokens=min(turn_tokens, room), sampling=sampling)
            running.append((talk, engine.generate(talk.session_id, params)))
    return running


def _hand_over(engine: Engine, talk: _Talk, between: list[int], tokens: int) -> None:
    """Give the word to the other speaker, if that leaves him room for one."""
    if len(talk.token_ids) + len(between) < tokens:
        _say(engine, talk, between)
    else:
        talk.is_over = True


def _say(engine: Engine, talk: _Talk, token_ids: list[int]) -> None:
    engine.append(talk.session_id, token_ids)
    talk.token_ids += token_ids
