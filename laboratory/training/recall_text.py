"""Text that teaches recall: facts of the evaluation's tasks in installed text, and many questions about them.

    filler … fact … filler … fact … copied block … | question answer question answer … block again

The sentences are those of `laboratory/evaluation/tasks.py`, with more names than its ten; the filler is the half of the
installed documents that no haystack is made of. So what is learned is measured on other text with other codes. Ids of
one row may leap ahead at the ends of pieces: rotations of long distances are met in short rows.
"""

from __future__ import annotations

import multiprocessing
import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from laboratory.evaluation.haystack import calibration_texts
from laboratory.evaluation.tasks import PEOPLE, TASKS, Question

Ids = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

END = "<|endoftext|>"
_DIGIT = re.compile("([0-9])")
_IS_PERSON = re.compile(rf"\b({'|'.join(PEOPLE)})\b")
_MORE_NAMES = 600
_CODE_CHARACTERS = 1_500_000  # beside all of the prose
_CODE_SHARE = 0.25  # of pieces of filler
_ONCE = ("single", "aggregation")  # they name no person: a row has room for one of each
_REPEATED = ("multi", "values", "variables")
_MORE = ("multi", "variables", "variables")  # a chain of names is learned last
COPY = "copy"
KINDS = (*_ONCE, *_REPEATED, COPY)
_BESIDE = len(KINDS) + 1  # what is no digit in an answer about facts
_CUE, _COPIED = 2, (16, 64)  # ids of a copied block that are shown again, and of all of it
_LEAPS, _LEAPING = 8, 512  # how many, in rows of at least so many ids: a head finds its first match without
_SHORT = 200  # ids of questions: of so few, most are to be copied, which is learned first


def train_tokenizer(vocabulary: int) -> Tokenizer:
    """A byte-level BPE of calibration text and of the tasks' sentences; a digit is a token, so a code is five."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    asked = [task.make(trial, 1) for task in (TASKS[name] for name in (*_ONCE, *_REPEATED)) for trial in range(200)]
    sentences = [" ".join((*one.facts, one.question, one.opening)) for one in asked]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*calibration_texts("prose"), *sentences], trainer)
    return tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """length: of a row, in ids; rows: of a batch. share: of a row, that facts and questions take at most.

    It ends when `enough` of the facts' digits are right, or at `until` of the time; the last one at the end.
    """

    length: int
    rows: int
    share: float
    until: float
    enough: float = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """[length] each: ids, their places, and of which of KINDS they are an answer, from 1; 0: of none. Of answers about
    facts only digits count as their kind's, the rest is one more."""

    ids: Ids
    places: Ids
    answers: Ids


class RecallText:
    """Makes rows. positions: beyond all places of a row."""

    def __init__(self, tokenizer: Tokenizer, *, positions: int) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self._positions = positions
        self._end = int(tokenizer.token_to_id(END) or 0)
        self._vocabulary = tokenizer.get_vocab_size()
        self._counts = np.array([tokenizer.decode([token]).isdigit() for token in range(self._vocabulary)])
        self._filler = [
            _Filler(tokenizer, text)
            for text in (
                "\n\n".join(calibration_texts("prose")),
                "\n\n".join(calibration_texts("code"))[:_CODE_CHARACTERS],
            )
        ]
        words = re.findall(r"\b[a-z]{4,9}\b", "\n".join(calibration_texts("prose")))
        self._names = [word.capitalize() for word in random.Random(0).sample(sorted(set(words)), _MORE_NAMES)]

    def row(self, length: int, rng: random.Random, *, share: float) -> Row:
        """share: of the row, that facts, questions and answers take, about."""
        facts, asked = self._episodes(int(length * share), rng)
        room = length - sum(map(len, facts)) - sum(len(ids) for ids, _ in asked)
        ids, starts = self._planted(facts, max(room, 0), rng)
        pieces, answers = [ids], [np.zeros(len(ids), bool)]
        at = len(ids)
        for question, answer in asked:
            starts.append(at)
            at += len(question)
            pieces.append(question)
            answers.append(answer)
        row_ids = np.concatenate(pieces)[:length]
        return Row(
            ids=row_ids,
            places=self._places(length, starts, rng),
            answers=np.concatenate(answers)[:length],
        )

    # -- what is asked ------------------------------------------------------------------------------------------------

    def _episodes(self, room: int, rng: random.Random) -> tuple[list[Ids], list[tuple[Ids, Ids]]]:
        """Facts in an order in which they may be planted; questions with which of their ids are an answer."""
        names = self._name_supply(rng)
        facts: list[tuple[float, Ids]] = []
        asked: list[tuple[Ids, Ids]] = []
        used, left, longest = 0, list(_ONCE), max(_COPIED[0], min(_COPIED[1], room // 2))
        while used < room:
            kinds = (*_REPEATED, *_MORE, COPY, *left)
            kind = COPY if room < _SHORT and rng.random() < 0.4 else rng.choice(kinds)
            if kind in left:
                left.remove(kind)
            more: list[tuple[Ids, Flags]]
            if kind == COPY:
                block = np.array([rng.randrange(1, self._vocabulary) for _ in range(rng.randint(_COPIED[0], longest))])
                facts.append((rng.random(), block))
                used += len(block)
                more = [(block, np.arange(len(block)) >= _CUE)]
            else:
                questions = self._questions(kind, names, rng)
                said = questions[0].facts
                if len(questions) > 1:  # a fact for each question: any of them do
                    questions = rng.sample(questions, rng.randint(1, len(questions)))
                    said = tuple(question.facts[question.asked] for question in questions)
                own = [(rng.random(), self._encode(f"\n\n{fact}\n\n")) for fact in said]
                places = sorted(place for place, _ in own)
                facts += [(place, ids) for place, (_, ids) in zip(places, own, strict=True)]
                used += sum(len(ids) for _, ids in own)
                more = [self._asked(question) for question in questions]
            asked += [
                (ids, is_answer * np.where(self._counts[ids] | (kind == COPY), 1 + KINDS.index(kind), _BESIDE))
                for ids, is_answer in more
            ]
            used += sum(len(ids) for ids, _ in more)
        rng.shuffle(asked)
        return [ids for _, ids in sorted(facts, key=lambda one: one[0])], asked

    def _questions(self, kind: str, names: Iterator[str], rng: random.Random) -> list[Question]:
        """All that can be asked about the facts of one question, of people whom the row knows nothing of yet."""
        task, seed = TASKS[kind], rng.getrandbits(32)
        questions = [task.make(trial, seed) for trial in range(task.asked_together)]
        new = {one: next(names) for one in dict.fromkeys(_IS_PERSON.findall(" ".join(questions[0].facts)))}
        return [_renamed(question, new) for question in questions]

    def _name_supply(self, rng: random.Random) -> Iterator[str]:
        """Each once, the evaluation's among the first; then two and two of them, and so on."""
        some = [*PEOPLE, *rng.sample(self._names, len(PEOPLE))]
        rng.shuffle(some)
        yield from some
        seen = set(some)
        for parts in count(2):
            for _ in range(len(self._names)):
                name = " ".join(rng.choice(self._names) for _ in range(parts - 1))
                if name not in seen:
                    seen.add(name)
                    yield name

    def _encode(self, text: str) -> Ids:
        """As the tokenizer does, with what is between digits remembered: it comes again and again."""
        found: list[int] = []
        for part in _DIGIT.split(text):
            if part not in self._known:
                self._known[part] = self._tokenizer.encode(part, add_special_tokens=False).ids
            found += self._known[part]
        return np.array(found)

    def _asked(self, question: Question) -> tuple[Ids, Flags]:
        before = self._encode(f"\n\n{question.question} {question.opening}")
        answer = np.append(self._encode(question.answer), self._end)
        return np.concatenate([before, answer]), np.arange(len(before) + len(answer)) >= len(before)

    # -- where it stands ----------------------------------------------------------------------------------------------

    def _planted(self, facts: Sequence[Ids], room: int, rng: random.Random) -> tuple[Ids, list[int]]:
        """Filler of `room` ids with the facts in it, and where its pieces begin."""
        cuts = sorted(rng.randrange(room + 1) for _ in facts)
        pieces: list[Ids] = []
        starts, at, done = [], 0, 0
        for number in range(len(facts) + 1):
            upto = cuts[number] if number < len(facts) else room
            while done < upto:
                filler = self._filler[rng.random() < _CODE_SHARE].piece(min(upto - done, rng.randint(100, 1500)), rng)
                starts.append(at)
                pieces.append(filler)
                at += len(filler)
                done += len(filler)
            if number < len(facts):
                starts.append(at)
                pieces.append(facts[number])
                at += len(facts[number])
        return np.concatenate(pieces), starts

    def _places(self, length: int, starts: Sequence[int], rng: random.Random) -> Ids:
        steps = np.ones(length, np.int64)
        steps[0] = 0
        free = self._positions - length
        if free > 0 and length >= _LEAPING and rng.random() < 0.75:
            total = int(free * rng.random() ** 2)
            cuts = sorted(rng.randrange(total + 1) for _ in range(_LEAPS))
            inner = [start for start in starts if 0 < start < length]
            for leap in np.diff([0, *cuts]):
                if inner:
                    steps[rng.choice(inner)] += leap
        return np.cumsum(steps)


class _Filler:
    """Ids of a long text, cut where sentences or lines end."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._all = _ids(tokenizer, text)
        ending = [
            tokenizer.decode([token]).rstrip(" ").endswith((".", "\n")) for token in range(tokenizer.get_vocab_size())
        ]
        self._ends = np.flatnonzero(np.array(ending)[self._all]) + 1

    def piece(self, length: int, rng: random.Random) -> Ids:
        """Of that length, from the beginning of a sentence to the end of one, where that is possible."""
        first = self._ends[rng.randrange(len(self._ends))]
        first = min(first, len(self._all) - length)
        return self._all[first : first + length]


def _renamed(question: Question, names: dict[str, str]) -> Question:
    new = partial(_IS_PERSON.sub, lambda match: names[match[0]])
    return replace(
        question,
        facts=tuple(map(new, question.facts)),
        question=new(question.question),
        opening=new(question.opening),
    )


def _ids(tokenizer: Tokenizer, text: str) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids)


# -- rows -------------------------------------------------------------------------------------------------------------

_texts: list[RecallText] = []  # of a process that makes rows: one


def _take_text(text: RecallText) -> None:
    _texts[:] = [text]


def _batch(stage: Stage, seed: str) -> list[Ids]:
    rng = random.Random(seed)
    share = stage.share * rng.uniform(0.5, 1)
    rows = [_texts[0].row(stage.length, rng, share=share) for _ in range(stage.rows)]
    kinds = (np.int16, np.int32, np.int8)
    parts = ([row.ids for row in rows], [row.places for row in rows], [row.answers for row in rows])
    return [np.stack(part).astype(kind) for part, kind in zip(parts, kinds, strict=True)]


class Rows:
    """Batches of each stage, made ahead in processes of their own; none: made when they are asked for."""

    def __init__(self, text: RecallText, stages: Sequence[Stage], *, seed: int, processes: int) -> None:
        self._stages, self._seed, self._processes = stages, seed, processes
        self._numbers = [0] * len(stages)
        self._waiting: list[deque[Future[list[Ids]]]] = [deque() for _ in stages]
        _take_text(text)
        self._pool = None
        if processes:
            # Forked: they have the text at once, and import nothing. None of them has anything to do with a GPU.
            self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"))

    def begin(self) -> None:
        """Start the processes, before there is anything that a copy of this one must not have: threads, a GPU."""
        for made in self._ahead(0)[: self._processes] if self._pool is not None else ():
            made.result()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def next(self, stage: int) -> list[Ids]:
        if self._pool is None:
            return _batch(self._stages[stage], self._name(stage))
        self._ahead(stage)
        return self._waiting[stage].popleft().result()

    def _ahead(self, stage: int) -> list[Future[list[Ids]]]:
        """Have some made of this stage, most, and of the next, which should not wait when it begins."""
        assert self._pool is not None
        for one in range(min(stage + 2, len(self._stages))):
            while len(self._waiting[one]) < (2 * self._processes if one == stage else self._processes // 2 + 1):
                self._waiting[one].append(self._pool.submit(_batch, self._stages[one], self._name(one)))
        return list(self._waiting[stage])

    def _name(self, stage: int) -> str:
        self._numbers[stage] += 1
        return f"{self._seed}/{stage}/{self._numbers[stage]}"
