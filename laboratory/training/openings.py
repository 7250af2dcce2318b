"""Conversations to calibrate on: those that a model has with itself, begun in several languages and formats.

What calibration never saw is restored worst. Evaluation has openings of its own, none of them here.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_engine.engine import Engine
from laboratory import conversations
from laboratory.conversations import ChatTokenizer, Opening

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

    Raises ModelError if the tokenizer's template does not show where a speaker's words go.
    """
    openings = [
        Opening(words=OPENINGS[(seed + index) % len(OPENINGS)], seed=seed * 1000 + index) for index in range(count)
    ]
    return conversations.converse(
        engine,
        tokenizer,
        openings,
        stop_ids=stop_ids,
        turns=turns,
        turn_tokens=max(16, tokens // turns),
        tokens=tokens,
    )
