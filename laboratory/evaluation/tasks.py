"""Tasks of recall: what is planted in a haystack, what is asked, and what counts as right.

    single           a pass key of five digits                       first number of the answer = the key
    multi            the keys of five people; each is asked for      first number = the key of the one asked for
    counterfactual   a fact that the model knows to be otherwise     first words = what the text says
    tool_call        a call with its arguments                       the answer is that call, as JSON

The opening of the answer is given, so that a model is scored for what it finds and not for how it likes to begin, and
base models can be asked as well. A question is a function of (task, trial, seed) alone.
"""

from __future__ import annotations

import enum
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass


class Grade(enum.Enum):
    EXACT = "exact"
    OTHER_FACT = "another planted fact"
    PRIOR = "what is true outside the text"
    VALID_CALL = "a valid call, but another one"
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Sentences to plant in this order, which of them is asked for, and how: `question`, then the answer's `opening`.

    grade: of what the model adds to the opening.
    """

    facts: tuple[str, ...]
    asked: int
    question: str
    opening: str
    grade: Callable[[str], Grade]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """make: the question of (trial, seed). facts: how many are planted at once. chance: share that is right by finding
    planted facts without knowing which is asked for.

    Trials that differ only in the fact asked for share their facts and the text around them. questions: how many
    there are (None: without end); further trials ask the first again, in other text.
    """

    name: str
    facts: int
    answer_tokens: int
    make: Callable[[int, int], Question]
    questions: int | None = None

    @property
    def chance(self) -> float:
        return 1 / self.facts if self.facts > 1 else 0.0

    def haystack(self, trial: int) -> int:
        return trial // self.facts

    def depths(self, trial: int, trials: int) -> tuple[float, ...]:
        """Where the facts go, as shares of the filler: over all trials, each sweeps its part of 5 to 95 % evenly."""
        haystacks = -(-trials // self.facts)
        along = self.haystack(trial) / (haystacks - 1) if haystacks > 1 else 0.5
        return tuple(0.05 + 0.9 * (fact + along) / self.facts for fact in range(self.facts))


def first_number(text: str) -> str:
    """The first unbroken run of digits; "" if there is none."""
    match = re.search(r"[0-9]+", text)
    return match[0] if match else ""


def begins_with(text: str, words: str) -> bool:
    """Whether the text's first words are these, whatever their case, after an article or punctuation."""
    return re.match(rf"\W*(?:(?:the|a|an)\s+)?{re.escape(words)}\b", text, re.IGNORECASE) is not None


def _single(trial: int, seed: int) -> Question:
    code = _code(random.Random(f"single/{seed}/{trial}"))
    return Question(
        facts=(f"The pass key is {code}. Remember it. {code} is the pass key.",),
        asked=0,
        question="What is the pass key mentioned in the text above?",
        opening="The pass key is",
        grade=lambda text: Grade.EXACT if first_number(text) == code else Grade.WRONG,
    )


_PEOPLE = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Peter")


def _multi(trial: int, seed: int) -> Question:
    haystack, asked = divmod(trial, _FACTS_OF_MULTI)
    rng = random.Random(f"multi/{seed}/{haystack}")
    people = rng.sample(_PEOPLE, _FACTS_OF_MULTI)
    codes = [_code(rng) for _ in people]

    def grade(text: str) -> Grade:
        found = first_number(text)
        if found == codes[asked]:
            return Grade.EXACT
        return Grade.OTHER_FACT if found in codes else Grade.WRONG

    return Question(
        facts=tuple(f"The pass key of {name} is {code}." for name, code in zip(people, codes, strict=True)),
        asked=asked,
        question=f"What is the pass key of {people[asked]} mentioned in the text above?",
        opening=f"The pass key of {people[asked]} is",
        grade=grade,
    )


# What is asked for, what is commonly known, and what the haystack says instead: nothing that a weak model might
# answer without it.
PRIORS = (
    ("the capital of France", "Paris", "Oslo"),
    ("the capital of Japan", "Tokyo", "Lima"),
    ("the capital of Italy", "Rome", "Nairobi"),
    ("the capital of Germany", "Berlin", "Havana"),
    ("the capital of Egypt", "Cairo", "Dublin"),
    ("the capital of Spain", "Madrid", "Hanoi"),
    ("the capital of Russia", "Moscow", "Bogota"),
    ("the capital of China", "Beijing", "Vienna"),
    ("the capital of India", "New Delhi", "Helsinki"),
    ("the capital of Canada", "Ottawa", "Athens"),
    ("the capital of Australia", "Canberra", "Prague"),
    ("the capital of Greece", "Athens", "Seoul"),
    ("the capital of Norway", "Oslo", "Manila"),
    ("the capital of Poland", "Warsaw", "Jakarta"),
    ("the capital of Ireland", "Dublin", "Santiago"),
    ("the colour of a ripe banana", "yellow", "purple"),
    ("the language spoken in Brazil", "Portuguese", "Finnish"),
    ("the currency of Japan", "yen", "peso"),
    ("the tallest animal", "giraffe", "hedgehog"),
    ("the fastest land animal", "cheetah", "tortoise"),
    ("the author of Hamlet", "William Shakespeare", "Leo Tolstoy"),
    ("the number of days in a week", "seven", "nineteen"),
    ("the boiling point of water in degrees Celsius", "100", "157"),
    ("the main ingredient of bread", "flour", "gravel"),
)


def _counterfactual(trial: int, seed: int) -> Question:
    order = list(PRIORS)
    random.Random(f"counterfactual/{seed}").shuffle(order)
    subject, known, planted = order[trial % len(order)]

    def grade(text: str) -> Grade:
        if begins_with(text, planted):
            return Grade.EXACT
        return Grade.PRIOR if begins_with(text, known) else Grade.WRONG

    return Question(
        facts=(f"{subject[0].upper()}{subject[1:]} is {planted}.",),
        asked=0,
        question=f"According to the text above, what is {subject}?",
        opening=f"According to the text above, {subject} is",
        grade=grade,
    )


_DOORS = ("amber", "blue", "copper", "green", "ivory", "orange", "purple", "silver", "white", "yellow")


def _tool_call(trial: int, seed: int) -> Question:
    rng = random.Random(f"tool_call/{seed}/{trial}")
    door = rng.choice(_DOORS)
    call = {"name": "unlock_door", "arguments": {"door": door, "code": _code(rng)}}
    opening = '{"name":'

    def grade(text: str) -> Grade:
        try:
            found, _ = json.JSONDecoder().raw_decode(opening + text)
        except ValueError:
            return Grade.WRONG
        if found == call:
            return Grade.EXACT
        is_call = set(found) == set(call) and isinstance(found["arguments"], dict)
        return Grade.VALID_CALL if is_call else Grade.WRONG

    return Question(
        facts=(f"The tool call that unlocks the {door} door is {json.dumps(call)}",),
        asked=0,
        question=f"What is the tool call that unlocks the {door} door? Answer in JSON.",
        opening=opening,
        grade=grade,
    )


def _code(rng: random.Random) -> str:
    return str(rng.randint(10_000, 99_999))


_FACTS_OF_MULTI = 5
TOOL_CALL = "tool_call"

TASKS = {
    task.name: task
    for task in (
        Task(name="single", facts=1, answer_tokens=12, make=_single),
        Task(name="multi", facts=_FACTS_OF_MULTI, answer_tokens=12, make=_multi),
        Task(name="counterfactual", facts=1, answer_tokens=12, make=_counterfactual, questions=len(PRIORS)),
        Task(name=TOOL_CALL, facts=1, answer_tokens=48, make=_tool_call),
    )
}
