"""Conversations that the model has with itself: calibration text of the kind a session holds.

The model writes the user's words too, by being let go where the chat template has the user speak. Every turn is
sampled, so the text is the model's own distribution, formatting and end-of-turn ids included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inference_engine.engine import Engine
from inference_engine.types import Finished, GenerateParams, Sampling, TokenCommitted
from kv_cache_proposer.f_theta.errors import LatentError

_MARKER = "Kqzwxjvbm"

# How conversations begin. Several languages and formats: what calibration never saw is restored worst.
OPENINGS = (
    "Explain how a bicycle stays upright.",
    "Write a Python function that merges two sorted lists, with tests.",
    "Plan a week of meals for two people on a small budget.",
    "Summarise the causes of the French Revolution in five points.",
    'Return a JSON object with the fields "name", "tags" and "score" for three books.',
    "My build fails with 'undefined reference to main'. What do I check first?",
    "Erkläre mir bitte, wie ein Kühlschrank funktioniert.",
    "¿Qué lugares debería visitar en Sevilla en dos días?",
    "Raconte une courte histoire sur un phare et une tempête.",
    "请用简单的语言解释什么是光合作用。",
    "Explique a diferença entre clima e tempo.",
    "Write a shell script that renames all .jpeg files to .jpg and say what each line does.",
    "Compare SQLite and PostgreSQL for a small web shop, as a table.",
    "Tell me about a day in the life of a lighthouse keeper.",
    "What is 17 * 23? Show the steps.",
    "Translate 'the train leaves at seven' into German, French and Spanish.",
)


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer: transformers' own have it."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


@dataclass(slots=True)
class _Talk:
    session_id: str
    token_ids: list[int]


def converse(
    engine: Engine,
    tokenizer: ChatTokenizer,
    *,
    stop_ids: Sequence[int],
    count: int,
    turns: int,
    tokens: int,
    seed: int,
) -> list[list[int]]:
    """Token ids of `count` conversations of about `turns` turns, each at most `tokens` long, all at the same time.

    Raises LatentError if the tokenizer's template does not let us find where a speaker's words go.
    """
    before_user, before_assistant = (_head(tokenizer, role) for role in ("user", "assistant"))
    talks = []
    for index in range(count):
        session = engine.create_session(eos_token_ids=tuple(stop_ids), limit_tokens=tokens)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": OPENINGS[(seed + index) % len(OPENINGS)]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        talk = _Talk(session.session_id, [])
        _say(engine, talk, tokenizer.encode(text, add_special_tokens=False))
        talks.append(talk)
    most = max(16, tokens // turns)
    for turn in range(turns):
        running = [
            (
                talk,
                engine.generate(
                    talk.session_id,
                    GenerateParams(
                        max_tokens=min(most, tokens - len(talk.token_ids)),
                        sampling=Sampling(temperature=0.9, top_p=0.95, seed=seed * 1000 + index),
                    ),
                ),
            )
            for index, talk in enumerate(talks)
            if len(talk.token_ids) < tokens
        ]
        head = before_user if turn % 2 == 0 else before_assistant
        for talk, generation in running:
            ended = False
            for event in generation:
                if isinstance(event, TokenCommitted):
                    talk.token_ids.append(event.token_id)
                ended = isinstance(event, Finished) and talk.token_ids[-1] in stop_ids
            if len(talk.token_ids) + len(head) < tokens:
                _say(engine, talk, head if ended else [stop_ids[0], *head])
    for talk in talks:
        engine.close_session(talk.session_id)
    return [talk.token_ids for talk in talks]


def _say(engine: Engine, talk: _Talk, token_ids: list[int]) -> None:
    engine.append(talk.session_id, token_ids)
    talk.token_ids += token_ids


def _head(tokenizer: ChatTokenizer, role: str) -> list[int]:
    """What stands between the end of a turn and the words of `role`."""
    other = "assistant" if role == "user" else "user"
    talk = [{"role": "user", "content": "Hello"}] if other == "assistant" else []
    talk += [{"role": other, "content": _MARKER}, {"role": role, "content": _MARKER}]
    rendered: str = tokenizer.apply_chat_template(talk, tokenize=False)
    parts = rendered.split(_MARKER)
    if len(parts) != 3:
        raise LatentError("the chat template does not show where a speaker's words go; give text with --text instead")
    between = tokenizer.encode(parts[1], add_special_tokens=False)
    return list(between[1:])  # without the id that ends the turn before
