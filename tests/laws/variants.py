"""Every registered strategy, small enough that windows wrap and entries leave within a short test.

A package that adds a strategy names its small variants by an entry point of the group `kakeya.variants` with the
strategy's name: a tuple of dictionaries of options. `--strategies NAME …` runs the laws over these strategies alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from itertools import combinations, cycle, repeat
from typing import Any

import numpy as np
import pytest

from inference_engine.engine import Engine
from inference_engine.kv.strategies import make_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy, Option
from inference_engine.types import Event, Finished, GenerateParams, Mode, Sampling, TokenCommitted
from tests.further import covering, first_of_each, further
from tests.tiny import LATENT_BYTES, PAGES, VOCABULARY, tiny_forward
from tests.tiny_native import served_engine

LATENT: dict[str, Option] = {"sink": 2, "source": "latent", "bytes_per_token": LATENT_BYTES}
_DRAFTER: dict[str, Option] = {**LATENT, "source": "drafter"}
_SELECT: dict[str, Option] = {**LATENT, "mode": "select", "run": 1, "appended": "all"}

_SMALL_OPTIONS: dict[str, list[dict[str, Option]]] = {
    "full": [{}, {"codec": "identity", "exact_window": 8, "exact_layers": (0,)}, {"codec": "int8", "exact_window": 16}],
    # The second window is wider than TinyModel's own, the third is narrower and no multiple of a page, without a sink.
    "sink_window": [
        {"sink": 4, "window": 16},
        {"sink": 3, "window": 40},
        {"sink": 0, "window": 7},
        {"sink": 2, "window": 44, "codec": "int8", "exact_window": 9},
        # Entries leave before they are old enough to be coded.
        {"sink": 2, "window": 9, "codec": "int8", "exact_window": 20},
    ],
    # The last layer full; TinyModel's first is sliding by itself, what is between is windowed.
    "layer_window": [
        {"sink": 4, "window": 16, "full_layers": (2,)},
        {"sink": 0, "window": 7, "full_layers": (2,)},
        {"sink": 3, "window": 44, "full_layers": (2,), "codec": "int8", "exact_window": 9},
        {"sink": 4, "window": 16, "full_layers": (2,), "codec": "int8", "exact_window": 20, "exact_layers": (1,)},
        # A sink wider than a segment: the sets of layers begin to code at different times.
        {"sink": 20, "window": 40, "full_layers": (2,), "codec": "int8", "exact_window": 5},
    ],
    # Few blocks, few tokens; and budgets that read everything.
    "gather": [
        {"block": 8, "sink": 4, "window": 16, "budget": 48, "scorer": "bounds"},
        {"block": 4, "sink": 0, "window": 20, "budget": 400, "scorer": "bounds"},
        {"scorer": "components", "sink": 3, "window": 16, "budget": 75, "rank": 5, "bits": 3, "run": 1},
        {"scorer": "components", "sink": 0, "window": 20, "budget": 400, "rank": 8, "bits": 4, "run": 2},
    ],
    # Windows narrower and wider than a segment, blocks that do not divide one; and a budget that reads everything.
    "tiered": [
        {"block": 8, "sink": 4, "window": 16, "budget": 48, "resident_tokens": 20},
        {"block": 12, "sink": 0, "window": 20, "budget": 68, "resident_tokens": 40},
        {"block": 4, "sink": 0, "window": 20, "budget": 400, "resident_tokens": 20},
    ],
    # Exact windows narrower and wider than TinyModel's own; without a sink.
    "restored": [
        {"sink": 4, "window": 16},
        {"sink": 0, "window": 40},
        {**LATENT, "window": 12},
        {**LATENT, "sink": 3, "window": 13, "mode": "stream"},
        # Few latents on the device: a segment pushes out all of them, and some of its own.
        {**LATENT, "window": 16, "resident_latent_bytes": 1800},
        {**LATENT, "sink": 0, "window": 9, "resident_latent_bytes": 7000, "mode": "stream"},
        # Of what a drafter reads: codes of the exact window, too.
        {**_DRAFTER, "window": 12},
        {**_DRAFTER, "sink": 0, "window": 17, "mode": "stream"},
        {**_SELECT, **_DRAFTER, "sink": 3, "window": 16, "budget": 63, "rank": 5, "bits": 3, "awake_bytes": 15 * 768},
        # Few tokens of choice, of which a few more are held; and all of them.
        {**_SELECT, "sink": 3, "window": 16, "budget": 63, "rank": 5, "bits": 3, "awake_bytes": 15 * 768},
        {**_SELECT, "sink": 0, "window": 20, "budget": 400, "rank": 8, "bits": 4, "awake_bytes": 348 * 768},
        # Appended tokens choose, too; no more are held than one of them chooses.
        {**_SELECT, "window": 17, "budget": 63, "rank": 5, "bits": 3, "awake_bytes": 12 * 768, "appended": "select"},
    ],
}

# More than twice every window, and not a multiple of a segment.
LENGTH = 107


@cache
def _small_options() -> dict[str, Iterable[dict[str, Option]]]:
    return _SMALL_OPTIONS | {point.name: point.load() for point in entry_points(group="kakeya.variants")}


def all_strategies() -> list[KVStrategy]:
    small = _small_options()
    missing = set(strategy_names()) - set(small)
    assert not missing, f"give the laws a small variant of {missing}"
    return [make_strategy(name, **options) for name, variants in small.items() for options in variants]


@cache
def mechanism(strategy: KVStrategy) -> str:
    """What distinguishes variants of one strategy besides numbers: how it keeps old entries, and how they come back."""
    options = strategy.options()
    coded = "coded" if options.get("codec") else ""
    words = (strategy.name, coded, *(options.get(option) for option in ("source", "mode", "scorer", "appended")))
    return " ".join(str(word) for word in words if word)


def reads_chunks(strategy: KVStrategy) -> bool:
    """Do some tokens read old entries chunk by chunk, outside the regions?"""
    options = strategy.options()
    return options.get("mode") == "stream" or (options.get("mode") == "select" and options.get("appended") != "select")


def reads_by_views(strategy: KVStrategy) -> bool:
    """Do generated tokens read by views on the native backend, too, whose sums depend on the step?"""
    geometry = tiny_forward().geometry(**PAGES)
    rules = [strategy.rule(layer, geometry) for layer in range(len(geometry.layers))]
    return reads_chunks(strategy) or any(each.by_view for rule in rules for each in rule.mechanisms)


def _common(value: Any) -> Hashable:
    return mechanism(value) if isinstance(value, KVStrategy) else value


def _named(value: Any) -> str:
    return str(value.value) if isinstance(value, Mode) else str(value)


def each_strategy_with(
    *, in_turn: Mapping[str, Sequence[Any]] | None = None, **parameters: Sequence[Any]
) -> pytest.MarkDecorator:
    """Every strategy, every mechanism with every value of the other parameters, and every pair of theirs.

    Strategies whose mechanism has met all values before are further cases. in_turn: parameters whose values take turns.
    """
    turning = in_turn or {}
    names = ("strategy", *parameters, *turning)
    cases = covering(all_strategies(), *parameters.values(), of=_common)
    turns = zip(*map(cycle, turning.values()), strict=False) if turning else repeat(())
    cases = [case + turn for case, turn in zip(cases, turns, strict=False)]
    ids = ["-".join(_named(value) for value in case) for case in cases]
    chosen = [
        case if is_new else further(*case) for case, is_new in zip(cases, meet_first(cases, of=_common), strict=True)
    ]
    return pytest.mark.parametrize(names, chosen, ids=ids)


def meet_first(cases: Iterable[tuple[Any, ...]], *, of: Callable[[Any], Hashable]) -> Iterator[bool]:
    """Of each case: do two of its values meet for the first time?"""
    met: set[Hashable] = set()
    for case in cases:
        pairs = {*combinations(enumerate(of(value) for value in case), 2)}
        yield not pairs <= met
        met |= pairs


# Of the cases of a law, in `make test`: the others are further ones.
FEW_CASES = 5


def by_turns(cases: Sequence[tuple[tuple[str, ...], KVStrategy, tuple[str, ...]]], few: int = FEW_CASES) -> list[bool]:
    """Of each case, a law with its other values, a strategy, and values that take turns, as modes do: does it stay?

    `few` of each law do: those whose mechanism, mode and variant had fewest turns before. So every law has several
    mechanisms and both modes, and every mechanism and variant has both modes in some laws.
    """
    laws: dict[tuple[str, ...], list[int]] = {}
    for number, (law, _, _) in enumerate(cases):
        laws.setdefault(law, []).append(number)
    turns: Counter[Hashable] = Counter()
    stays = [False] * len(cases)
    for law, numbers in laws.items():
        known: dict[int, tuple[Hashable, ...]] = {}
        for number in numbers:
            _, strategy, values = cases[number]
            kind = mechanism(strategy)
            of_law = ((law, kind), *((law, value) for value in values))
            known[number] = *of_law, kind, *((kind, value) for value in values), str(strategy)
        while numbers and few > len(known) - len(numbers):
            chosen = min(numbers, key=lambda number: [turns[value] for value in known[number]])
            numbers.remove(chosen)
            turns.update(known[chosen])
            stays[chosen] = True
    return stays


MODES = list(Mode)
each_strategy = pytest.mark.parametrize("strategy", all_strategies(), ids=str)
each_mode = pytest.mark.parametrize("mode", MODES, ids=_named)
# For what depends on how entries are kept and come back, and not on how many: others of a mechanism say nothing more.
each_mechanism = pytest.mark.parametrize("strategy", first_of_each(all_strategies(), mechanism), ids=str)
# For what depends on how entries come back alone.
each_way = pytest.mark.parametrize(
    "strategy", first_of_each(all_strategies(), lambda one: (one.name, one.options().get("mode"))), ids=str
)


def text(length: int = LENGTH, *, seed: int = 0) -> list[int]:
    """A repeatable history of token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


def drain(events: Any) -> list[Event]:
    return list(events)


def tokens(events: list[Event]) -> list[tuple[int, float | None]]:
    """(token id, logprob) of each committed token."""
    return [(event.token_id, event.logprob) for event in events if isinstance(event, TokenCommitted)]


# From LENGTH on they cross the boundary of a segment, as any 16 would.
FEW = 8


def generate(
    engine: Engine, session_id: str, count: int = FEW, *, sampling: Sampling | None = None
) -> list[tuple[int, float | None]]:
    """Run a Generate to its end; its tokens with their log-probabilities, which show differences that ids hide."""
    params = GenerateParams(max_tokens=count, sampling=sampling or Sampling(), logprobs=True)
    return tokens(drain(engine.generate(session_id, params)))


def prefill(engine: Engine, session_id: str) -> Finished:
    """Prefill the session's history, and generate nothing."""
    done = drain(engine.generate(session_id, GenerateParams(max_tokens=0)))[-1]
    assert isinstance(done, Finished)
    return done


# Log-probabilities of order 5 in float32, summed in different orders.
ROUNDING = 1e-3


def same(
    one: list[tuple[int, float | None]],
    other: list[tuple[int, float | None]],
    mode: Mode,
    *,
    within: float | None = None,
) -> bool:
    """Equal to the bit in fixed-shape mode; equal ids and log-probabilities up to rounding in batched mode.

    within: by how much those may differ; None: by ROUNDING.
    """
    if mode is Mode.FIXED_SHAPE:
        return one == other
    ids = [token for token, _ in one] == [token for token, _ in other]
    ours, theirs = ([logprob or 0.0 for _, logprob in run] for run in (one, other))
    return ids and bool(np.allclose(ours, theirs, atol=within or ROUNDING))


def engine_for(mode: Mode, **settings: Any) -> Engine:
    return served_engine(mode=mode, **settings)
