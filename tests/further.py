"""What `make test` has no time for: `make test-further` runs it, and `make test-long`.

Cases that say little more than others; the laboratory and the benchmarks, which no server imports; the HTTP door; the
site and wheels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

# The expression of a run that has none of them.
UNREAD = "not long and not apple"
FURTHER = (pytest.mark.long, pytest.mark.further)
# All tests in them are further ones; what users start of the laboratory, the other commands, is in `make test`.
LABORATORY = (
    "tests/laboratory/evaluation",
    "tests/laboratory/training",
    "tests/laboratory/commands/test_train_drafter.py",
)
# Likewise of programs that measure and make records.
BENCHMARKS = (
    "tests/laboratory/bench/test_cpu.py",
    "tests/laboratory/bench/test_gpu_benches.py",
    "tests/laboratory/bench/test_hibernation_bench.py",
    "tests/laboratory/bench/test_hybrids_bench.py",
    "tests/laboratory/bench/test_journal_bench.py",
    "tests/laboratory/bench/test_kept_sessions_bench.py",
    "tests/laboratory/bench/test_latent_attention_bench.py",
    "tests/laboratory/bench/test_long_session.py",
    "tests/mlx/test_measures.py",
    "tests/mlx/test_suite.py",
)
# Of the HTTP door, `make test-http` runs all; `make test` has what a completion is.
HTTP = tuple(
    f"tests/server/http/test_{part}.py"
    for part in (
        *("access", "attacks", "connections", "leaving", "neighbours"),
        *("process", "refusals", "request", "template", "text"),
    )
)
# And of what is published: the site of the documents, wheels, and what published clients make of the gateway.
PUBLISHED = ("tests/docs/test_site.py", "tests/test_packages.py", "tests/gateway/test_clients.py")


def further(*values: Any) -> Any:
    """The parameters of such a case."""
    return pytest.param(*values, marks=FURTHER)


def further_test(test: Callable[..., Any]) -> Any:
    """A test all cases of which are such ones."""
    for mark in FURTHER:
        test = mark(test)
    return test


def interpreted(*values: Any) -> Any:
    """The parameters of a case that takes long where a GPU's kernels are interpreted: there it is a further one."""
    import torch

    return pytest.param(*values) if torch.cuda.is_available() else further(*values)


def off_metal(*values: Any) -> Any:
    """The parameters of a case of MLX that is a further one off a Mac: there it says little of Metal."""
    return pytest.param(*values) if sys.platform == "darwin" else further(*values)


def off_metal_test(test: Callable[..., Any]) -> Any:
    """A test all cases of which are such ones."""
    return test if sys.platform == "darwin" else further_test(test)


def covering(*parameters: Sequence[Any], of: Callable[[Any], Hashable] = lambda value: value) -> list[tuple[Any, ...]]:
    """Few of all combinations: every value occurs, and every pair of two parameters' values; the same each time.

    `of` names what values have in common: values of one name stand for each other in pairs, and take turns.
    """
    cases = list(product(*parameters))
    places = list(product(*(range(len(values)) for values in parameters)))
    shown = [
        {*enumerate(numbers)} | {*combinations(((place, of(value)) for place, value in enumerate(case)), 2)}
        for case, numbers in zip(cases, places, strict=True)
    ]
    missing: set[Hashable] = set().union(*shown)
    chosen: list[int] = []
    while missing:
        chosen.append(max(range(len(cases)), key=lambda number: len(shown[number] & missing)))  # the first of the best
        missing -= shown[chosen[-1]]
    return [cases[number] for number in sorted(chosen)]


def each_pair(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """The parameters of cases with every pair of two parameters' values; not with all combinations of more."""
    values = [list(some) for some in parameters.values()]
    places = covering(*(range(len(some)) for some in values))
    cases = [[some[place] for some, place in zip(values, case, strict=True)] for case in places]
    return pytest.mark.parametrize(tuple(parameters), cases, ids=lambda value: getattr(value, "__name__", str(value)))


def in_turn(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Each of some with one of the others, in turn; what is left of their combinations are further cases."""
    return [
        (one, other) if place == number % len(others) else further(one, other)
        for number, one in enumerate(some)
        for place, other in enumerate(others)
    ]


def first_of_each(values: Iterable[Any], of: Callable[[Any], Hashable]) -> list[Any]:
    """The first value of every kind. `of` names a value's kind."""
    found: dict[Hashable, Any] = {}
    for value in values:
        found.setdefault(of(value), value)
    return list(found.values())


def one_of_each(values: Iterable[Any], of: Callable[[Any], Hashable]) -> list[Any]:
    """The first value of every kind; the others are further cases. `of` names a value's kind."""
    seen: set[Hashable] = set()
    found = []
    for value in values:
        values_of_case = value if isinstance(value, tuple) else (value,)
        found.append(further(*values_of_case) if of(value) in seen else value)
        seen.add(of(value))
    return found


def make_further(item: pytest.Item) -> None:
    for mark in FURTHER:
        item.add_marker(mark)
