"""Which layers have to keep every KV entry: ranked by what their answers lose when each is windowed.

    damage    KL(full ‖ a set kept full) at the tokens of right answers, forced after their questions
    rank      window one layer at a time; the more damage, the higher the layer
    greedy    or give up one after the other, the least needed first: sees when layers stand in for each other

Source: Wu et al., Retrieval Head, arXiv 2404.15574.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation.asking import Asked, answer_all
from laboratory.evaluation.divergence import Floats, compare
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage
from laboratory.evaluation.prompts import Prompts
from laboratory.evaluation.tasks import TASKS, Grade, Question, Task
from laboratory.evaluation.trials import EvaluationVoid

_SEED = 1_000_003  # added to the seed for the needles that rank layers, so that none of them is in a sweep

Damage = Callable[[Sequence[tuple[int, ...]]], Sequence[float]]  # of each set of layers kept full, together


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """What the layers keep that are not kept full."""

    sink: int
    window: int

    def control(self) -> SinkWindow:
        """The strategy that keeps none full."""
        return SinkWindow(sink=self.sink, window=self.window)

    def keeping(self, full_layers: Sequence[int]) -> KVStrategy:
        """The strategy that keeps `full_layers` full and windows the others."""
        if not full_layers:
            return self.control()
        return LayerWindow(sink=self.sink, window=self.window, full_layers=tuple(sorted(full_layers)))


def candidates(geometry: Geometry) -> tuple[int, ...]:
    """Layers that look at everything by the model's own design, and so can be windowed or kept.

    Raises InvalidArgument if there is none.
    """
    layers = tuple(index for index, layer in enumerate(geometry.layers) if layer.native_window is None)
    if not layers:
        raise InvalidArgument("model", f"all {len(geometry.layers)} layers slide by themselves: none can be kept full")
    return layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Layers, the most needed first. harm: what giving each up did to the answers when it was ranked, in nats."""

    order: tuple[int, ...]
    harm: Mapping[int, float]


def rank(layers: Sequence[int], damage: Damage, *, is_greedy: bool = False) -> Ranking:
    """Rank layers by what windowing each alone does, or greedily: by what it does beside those given up before.

    The greedy search sees when layers stand in for each other, at the price of L² / 2 measurements instead of L.
    """
    if not is_greedy:
        harm = dict(zip(layers, damage([_without(layers, one) for one in layers]), strict=True))
        return Ranking(order=tuple(sorted(layers, key=lambda layer: (-harm[layer], layer))), harm=harm)
    kept, given_up, harm = tuple(layers), [], {}
    while kept:
        harms = damage([_without(kept, one) for one in kept])
        least = int(np.argmin(harms))
        harm[kept[least]] = harms[least]
        given_up.append(kept[least])
        kept = _without(kept, kept[least])
    return Ranking(order=tuple(reversed(given_up)), harm=harm)


def _without(layers: Sequence[int], one: int) -> tuple[int, ...]:
    return tuple(layer for layer in layers if layer != one)


def evenly(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the layers, evenly spaced."""
    assert 0 <= count <= len(layers)
    return tuple(layers[(2 * index + 1) * len(layers) // (2 * count)] for index in range(count))


def damage_to_answers(engine: Engine, windows: Windows, answers: Sequence[Passage]) -> Damage:
    """Measures KL(full ‖ kept) at the tokens of right answers, forced after their questions: mean over all of them."""

    def damage(kept: Sequence[tuple[int, ...]]) -> list[float]:
        return divergences(engine, [windows.keeping(layers) for layers in kept], answers)

    return damage


def divergences(engine: Engine, strategies: Sequence[KVStrategy], passages: Sequence[Passage]) -> list[float]:
    """KL(full ‖ strategy) of each, mean over the forced tokens of all passages.

    Raises InvalidArgument if the engine refuses any.
    """
    pieces: list[list[Floats]] = [[] for _ in strategies]
    for passage in passages:
        scores, refused = compare(engine, strategies, passage)
        if refused:
            raise InvalidArgument("length", "; ".join(f"{name}: {reason}" for name, reason in refused.items()))
        for place, strategy in enumerate(strategies):
            pieces[place].append(scores[str(strategy)].divergence)
    return [float(np.concatenate(piece).mean()) for piece in pieces]


def right_answers(
    target: Target, windows: Windows, task: str, kind: str, length: int, *, count: int, sweep: int, seed: int
) -> list[Passage]:
    """Full's own answers to questions that it answers rightly, each after its prompt; none of them is in the sweep.

    sweep: its trials. Raises InvalidArgument if the task has too few questions for both, EvaluationVoid if no fact is
    out of the window's reach, or full is never right.
    """
    asked, build = TASKS[task], Prompts(target.texts)
    if asked.questions is not None and sweep + count > asked.questions:
        raise InvalidArgument(
            "trials",
            f"{task} has {asked.questions} questions, {count} of them to rank layers by: at most "
            f"{asked.questions - count} trials can ask others, got {sweep}",
        )
    prompts = [
        build.build(
            kind,
            length,
            _other_question(asked, trial, sweep, seed),
            asked.depths(trial, count),
            f"rank/{seed}/{asked.haystack(trial)}",
        )
        for trial in range(count)
    ]
    segment = target.engine.config.segment_tokens
    far = [
        prompt
        for prompt in prompts
        if prompt.is_out_of_reach(sink=windows.sink, window=windows.window, segment_tokens=segment)
    ]
    answers = answer_all(
        target.engine,
        [Asked(strategy=Full(), token_ids=prompt.token_ids) for prompt in far],
        answer_tokens=asked.answer_tokens,
        stop_ids=target.stop_ids,
    )
    right = [
        Passage(kind="answer", prefix=prompt.token_ids, forced=tuple(answer))
        for prompt, answer in zip(far, answers, strict=True)
        if prompt.question.grade(target.tokenizer.decode(answer, skip_special_tokens=True)) is Grade.EXACT
    ]
    if not right:
        raise EvaluationVoid(
            f"of {count} facts to rank layers by, {len(far)} are out of the window's reach and full finds none of "
            "them: ask for other lengths, easier text, a narrower window, or more --rank-prompts"
        )
    return right


def _other_question(task: Task, trial: int, sweep: int, seed: int) -> Question:
    """One that no trial of the sweep asks: of another seed, or, where there are only so many, of those it leaves."""
    return task.make(trial, seed + _SEED) if task.questions is None else task.make(sweep + trial, seed)
