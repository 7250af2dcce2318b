"""Tasks of recall: what is planted in a haystack, what is asked, and what counts as right.

    single           a pass key of five digits                       first number of the answer = the key
    multi            the keys of five people; each is asked for      first number = the key of the one asked for
    counterfactual   a fact that the model knows to be otherwise     first words = what the text says
    tool_call        a call with its arguments                       the answer is that call, as JSON
    values           two keys of one person                          first two keys = these, in any order
    variables        a key, and who has the same key as whom         first number = the key that the names lead to
    aggregation      numbers that are called, some more often        first number = the one called most often

The last three are like tasks of RULER (Hsieh et al., arXiv 2404.06654): `multi` asks for one of several keys, these for
several values, for a chain of names, and for what only all places together say.

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
    PART = "a part of the facts"
    PRIOR = "what is true outside the text"
    VALID_CALL = "a valid call, but another one"
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Sentences to plant in this order, which of them is asked for, and how: `question`, then the answer's `opening`.

    grade: of what the model adds to the opening. answer: what would be right after it. also: further facts without
    which the answer cannot be known.
    """

    facts: tuple[str, ...]
    asked: int
    question: str
    opening: str
    grade: Callable[[str], Grade]
    answer: str
    also: tuple[int, ...] = ()

    @property
    def needed(self) -> tuple[int, ...]:
        """The facts that the answer needs, in their order."""
        return tuple(sorted({self.asked, *self.also}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """make: the question of (trial, seed). facts: how many are planted at once. chance: share that is right by finding
    planted facts without knowing which is asked for.

    `asked_together` trials, one after another, differ only in the fact asked for: they share their facts and the text
    around them. questions: how many there are (None: without end); further trials ask the first again, in other text.
    """

    name: str
    facts: int
    answer_tokens: int
    make: Callable[[int, int], Question]
    questions: int | None = None
    chance: float = 0.0
    asked_together: int = 1

    def haystack(self, trial: int) -> int:
        return trial // self.asked_together

    def depths(self, trial: int, trials: int) -> tuple[float, ...]:
        """Where the facts go, as shares of the filler: over all trials, each sweeps its part of 5 to 95 % evenly."""
        haystacks = -(-trials // self.asked_together)
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
        answer=f" {code}.",
    )


PEOPLE = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Peter")


def _multi(trial: int, seed: int) -> Question:
    haystack, asked = divmod(trial, _FACTS_OF_MULTI)
    rng = random.Random(f"multi/{seed}/{haystack}")
    people = rng.sample(PEOPLE, _FACTS_OF_MULTI)
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
        answer=f" {codes[asked]}.",
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
        answer=f" {planted}.",
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
        answer=json.dumps(call).removeprefix(opening),
    )


def _values(trial: int, seed: int) -> Question:
    rng = random.Random(f"values/{seed}/{trial}")
    (person,) = rng.sample(PEOPLE, 1)
    codes = _codes(rng, _VALUES)

    def grade(text: str) -> Grade:
        found = set(re.findall(r"[0-9]{5,}", text)[:_VALUES]) & set(codes)
        return Grade.EXACT if len(found) == _VALUES else Grade.PART if found else Grade.WRONG

    return Question(
        facts=tuple(f"One of the pass keys of {person} is {code}." for code in codes),
        asked=0,
        also=tuple(range(_VALUES)),
        question=f"What are the two pass keys of {person} mentioned in the text above?",
        opening=f"The two pass keys of {person} are",
        grade=grade,
        answer=f" {codes[0]} and {codes[1]}.",
    )


def _variables(trial: int, seed: int) -> Question:
    """Two chains, each of a key and a name that leads to it; the second name of one of them is asked for."""
    rng = random.Random(f"variables/{seed}/{trial}")
    people, codes, chain = rng.sample(PEOPLE, 4), _codes(rng, 2), rng.randrange(2)
    asked = people[2 + chain]

    def grade(text: str) -> Grade:
        found = first_number(text)
        if found == codes[chain]:
            return Grade.EXACT
        return Grade.OTHER_FACT if found in codes else Grade.WRONG

    return Question(
        facts=(
            *(f"The pass key of {people[one]} is {codes[one]}." for one in range(2)),
            *(f"The pass key of {people[2 + one]} is the same as the pass key of {people[one]}." for one in range(2)),
        ),
        asked=2 + chain,
        also=(chain,),
        question=f"What is the pass key of {asked} mentioned in the text above?",
        opening=f"The five digits of the pass key of {asked} are",
        grade=grade,
        answer=f" {codes[chain]}.",
    )


def _aggregation(trial: int, seed: int) -> Question:
    rng = random.Random(f"aggregation/{seed}/{trial}")
    codes = _codes(rng, len(_CALLS))
    calls = [code for code, times in zip(codes, _CALLS, strict=True) for _ in range(times)]
    rng.shuffle(calls)
    often = [place for place, code in enumerate(calls) if code == codes[0]]

    def grade(text: str) -> Grade:
        found = first_number(text)
        if found == codes[0]:
            return Grade.EXACT
        return Grade.OTHER_FACT if found in codes else Grade.WRONG

    return Question(
        facts=tuple(f"The number {code} was called." for code in calls),
        asked=often[0],
        also=tuple(often[1:]),
        question="Which number was called most often in the text above?",
        opening="The number that was called most often is",
        grade=grade,
        answer=f" {codes[0]}.",
    )


def _codes(rng: random.Random, count: int) -> list[str]:
    """All different."""
    return [str(code) for code in rng.sample(range(10_000, 100_000), count)]


def _code(rng: random.Random) -> str:
    return str(rng.randint(10_000, 99_999))


_FACTS_OF_MULTI = 5
_VALUES = 2
_CALLS = (4, 1, 1)  # how often each number is called
TOOL_CALL = "tool_call"

TASKS = {
    task.name: task
    for task in (
        Task(name="single", facts=1, answer_tokens=12, make=_single),
        Task(
            name="multi",
            facts=_FACTS_OF_MULTI,
            answer_tokens=12,
            make=_multi,
            chance=1 / _FACTS_OF_MULTI,
            asked_together=_FACTS_OF_MULTI,
        ),
        Task(name="counterfactual", facts=1, answer_tokens=12, make=_counterfactual, questions=len(PRIORS)),
        Task(name=TOOL_CALL, facts=1, answer_tokens=48, make=_tool_call),
        Task(name="values", facts=_VALUES, answer_tokens=24, make=_values),
        Task(name="variables", facts=4, answer_tokens=12, make=_variables, chance=1 / 2),
        Task(name="aggregation", facts=sum(_CALLS), answer_tokens=12, make=_aggregation, chance=1 / len(_CALLS)),
    )
}
