"""Prompts are exactly as long as asked, hold their facts where they say, and sound as the model's own template does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from laboratory.evaluation.haystack import CHAT, KINDS, Texts
from laboratory.evaluation.prompts import Prompt, Prompts
from laboratory.evaluation.self_talk import SelfTalk
from laboratory.evaluation.tasks import TASKS
from tests.tiny import tiny_engine
from tests.tiny_folder import END, START, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids(END)


@pytest.fixture(scope="module")
def texts() -> Iterator[Texts]:
    with tiny_engine() as engine:
        yield Texts(TOKENIZER, SelfTalk(engine, TOKENIZER, (STOP,), conversations=1))


def prompt(
    task: str = "single", trial: int = 0, *, kind: str = "looped", length: int = 500, texts: Texts | None = None
) -> Prompt:
    spec = TASKS[task]
    build = Prompts(texts or Texts(TOKENIZER))
    return build.build(kind, length, spec.make(trial, 0), spec.depths(trial, 10), spec.haystack(trial))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_exactly_as_long_as_asked_and_its_fact_is_where_it_says(
    kind: str, texts: Texts, subtests: pytest.Subtests
) -> None:
    for task, length in itertools.product(TASKS, (431, 509)):
        with subtests.test(task=task, length=length):
            for trial in range(10):
                made = prompt(task, trial, kind=kind, length=length, texts=texts)
                assert len(made.token_ids) == length
                planted = TOKENIZER.decode(made.token_ids[made.fact_at : made.fact_end])
                needed = [made.question.facts[fact] for fact in made.question.needed]
                assert planted.strip().startswith(needed[0]) and planted.strip().endswith(needed[-1])
                assert all(fact in planted for fact in needed)
                text = TOKENIZER.decode(made.token_ids)
                assert all(fact in text for fact in made.question.facts)
                tail = TOKENIZER.decode(made.token_ids[made.tail_at :])
                assert tail.startswith(f"{END}\n{START}user\n" if kind == CHAT else "\n\n")
                assert made.question.question in tail
                assert tail.endswith(made.question.opening)


def test_facts_sweep_the_depths_from_5_to_95_percent(subtests: pytest.Subtests) -> None:
    for task in TASKS:
        with subtests.test(task):
            depths = sorted({depth for trial in range(40) for depth in TASKS[task].depths(trial, 40)})
            assert [depths[0], depths[-1]] == pytest.approx([0.05, 0.95])
            assert max(after - before for before, after in itertools.pairwise(depths)) < 0.05


@pytest.mark.parametrize("window", [1, 16, 77, 300])
def test_out_of_reach_means_that_no_query_of_the_question_sees_the_fact(window: int, subtests: pytest.Subtests) -> None:
    for segment_tokens in (16, 48):
        with subtests.test(str(segment_tokens)):
            sink = 4
            for trial in range(10):
                made = prompt(trial=trial, length=477)
                seen: set[int] = set(range(sink))
                for query in range(made.tail_at, len(made.token_ids) + 12):
                    seen.update(range(max(0, query - query % segment_tokens - window), query + 1))
                expected = seen.isdisjoint(range(made.fact_at, made.fact_end))
                assert made.is_out_of_reach(sink=sink, window=window, segment_tokens=segment_tokens) is expected
