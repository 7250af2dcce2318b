"""Cases that say little more than others in `make test`: `make test-further` runs them, and `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

FURTHER = (pytest.mark.long, pytest.mark.further)


def further(*values: Any) -> Any:
    """The parameters of such a case."""
    return pytest.param(*values, marks=FURTHER)


def one_of_each(values: Iterable[Any], of: Callable[[Any], Hashable]) -> list[Any]:
    """The first value of every kind; the others are further cases. `of` names a value's kind."""
    seen: set[Hashable] = set()
    found = []
    for value in values:
        values_of_case = value if isinstance(value, tuple) else (value,)
        found.append(further(*values_of_case) if of(value) in seen else value)
        seen.add(of(value))
    return found
