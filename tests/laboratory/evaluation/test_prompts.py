"""Prompts are exactly as long as asked, hold their facts where they say, and sound as the model's own template does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from inference_engine.errors import InvalidArgument
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


def base_tokenizer() -> Any:
    bare = tiny_tokenizer()
    bare.chat_template = None
    return bare


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


def test_a_fact_in_a_conversation_is_said_in_a_turn(texts: Texts) -> None:
    for trial in range(10):
        made = prompt(trial=trial, kind=CHAT, length=509, texts=texts)
        before = TOKENIZER.decode(made.token_ids[: made.fact_at])
        assert before.startswith(f"{START}user\n")
        assert before.rpartition(START)[2].count(END) == 0


def test_the_same_trial_gives_the_same_prompt_and_others_other_codes() -> None:
    assert prompt(trial=3).token_ids == prompt(trial=3).token_ids
    assert len({prompt(trial=trial).question.facts for trial in range(20)}) == 20


def test_a_chat_model_gets_its_own_frame() -> None:
    text = TOKENIZER.decode(prompt().token_ids)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("mentioned in the text above?<|im_end|>\n<|im_start|>assistant\nThe pass key is")


def test_a_base_model_gets_text_to_go_on_with() -> None:
    task = TASKS["single"]
    made = Prompts(Texts(base_tokenizer())).build("looped", 300, task.make(0, 0), (0.5,), 0)
    text = TOKENIZER.decode(made.token_ids)
    assert "<|" not in text
    assert text.endswith("\n\nWhat is the pass key mentioned in the text above? The pass key is")


def test_a_base_model_is_refused_a_conversation_by_name() -> None:
    task = TASKS["single"]
    with pytest.raises(InvalidArgument, match="kinds: chat needs a model with a chat template"):
        Prompts(Texts(base_tokenizer())).build(CHAT, 300, task.make(0, 0), (0.5,), 0)


def test_facts_sweep_the_depths_from_5_to_95_percent(subtests: pytest.Subtests) -> None:
    for task in TASKS:
        with subtests.test(task):
            depths = sorted({depth for trial in range(40) for depth in TASKS[task].depths(trial, 40)})
            assert [depths[0], depths[-1]] == pytest.approx([0.05, 0.95])
            assert max(after - before for before, after in itertools.pairwise(depths)) < 0.05


def test_facts_are_planted_where_a_sentence_ends_nearest_to_the_depth() -> None:
    task = TASKS["single"]
    builder = Prompts(Texts(TOKENIZER))
    for depth in (0.05, 0.3, 0.62, 0.95):
        made = builder.build("looped", 509, task.make(0, 0), (depth,), 0)
        before = TOKENIZER.decode(made.token_ids[: made.fact_at])
        assert before.endswith(".")
        filler_tokens = made.tail_at - (made.fact_end - made.fact_at)
        assert made.fact_at / filler_tokens == pytest.approx(depth, abs=0.1)


def test_a_prompt_too_short_for_its_facts_is_refused_with_the_length_it_needs() -> None:
    with pytest.raises(InvalidArgument, match=r"lengths: .* needs at least \d+ ids, got 90"):
        prompt(length=90)


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
