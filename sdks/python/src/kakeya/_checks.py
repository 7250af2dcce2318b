"""What a number has to be before it goes on the wire.

protobuf would take `True` as 1, turn 1e300 into infinity and reject 2^32 with an error of its own; here each of them is
named, with its place and value. Ranges that are the runtime's to decide (temperature, top_p, …) stay the runtime's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import SupportsIndex

from kakeya._errors import InvalidArgument, InvalidTokenIds

MAX_TOKEN_ID = 2**32 - 1
# gRPC counts nanoseconds since 1970 in 63 bits; a later deadline has passed as soon as it is set.
MAX_SECONDS = 10**9
_FLOAT32_MAX = 3.4028234663852886e38


def token_ids(values: Iterable[object], field: str = "token_ids") -> list[int]:
    """`values` as plain ints in [0, 2^32).

    Takes any iterable of integers, one-dimensional numpy and torch integer arrays among them. Raises InvalidTokenIds
    at the first value that is not one: bool, float, text, negative, too large, nested.
    """
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        raise InvalidTokenIds(
            f"{field} must be a sequence of integers, got {type(values).__name__}; "
            "kakeya.tokenization turns text and messages into ids",
            field=field,
            index=None,
            value=values,
        )
    # An array as a whole is a hundred times faster to read than scalar by scalar.
    to_list = getattr(values, "tolist", None)
    items = to_list() if callable(to_list) else list(values)
    if not isinstance(items, list):
        raise InvalidTokenIds(
            f"{field} must have one dimension, got a single value {items!r}", field=field, index=None, value=items
        )
    if all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in items):
        return items
    return [_token_id(item, field, index) for index, item in enumerate(items)]


def _token_id(item: object, field: str, index: int) -> int:
    number = _integer(item)
    if number is not None and 0 <= number <= MAX_TOKEN_ID:
        return number
    problem = "must be an integer" if number is None else f"must be in [0, {MAX_TOKEN_ID}]"
    raise InvalidTokenIds(
        f"{field}[{index}] {problem}, got {item!r} ({type(item).__name__})", field=field, index=index, value=item
    )


def _integer(value: object) -> int | None:
    """`value` as an int if it is an integer of any library's making, else None. A bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a float tensor has the method and refuses
        return None


def whole_number(value: object, field: str, *, at_least: int = 0, below: int) -> int:
    """`value` as an int in [at_least, below). Raises InvalidArgument."""
    number = _integer(value)
    if number is not None and at_least <= number < below:
        return number
    raise invalid(field, f"must be an integer in [{at_least}, {below}), got {value!r}")


def finite(value: object, field: str) -> float:
    """`value` as a float that a 32-bit float can hold. Raises InvalidArgument."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and abs(number) <= _FLOAT32_MAX:
            return number
    raise invalid(field, f"must be a finite number, got {value!r}")


def seconds(value: object, field: str) -> float | None:
    """A duration above 0 and up to MAX_SECONDS, or None for no limit. Raises InvalidArgument."""
    if value is None:
        return None
    number = finite(value, field)
    if not 0 < number <= MAX_SECONDS:
        raise invalid(field, f"must be above 0 and at most {MAX_SECONDS} seconds, or None for no limit; got {value!r}")
    return number


def text(value: object, field: str) -> str:
    """`value` as text that UTF-8 can say. Raises InvalidArgument."""
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):
            value.encode()
            return value
    raise invalid(field, f"must be a text in UTF-8, got {value!r}")


def flag(value: object, field: str) -> bool:
    """`value` as a bool; 0 and 1 of any library's making are taken for one. Raises InvalidArgument."""
    if isinstance(value, bool):
        return value
    # numpy's is called one or the other, by its version.
    if type(value).__name__ in ("bool", "bool_") or _integer(value) in (0, 1):
        return bool(value)
    raise invalid(field, f"must be True or False, got {value!r}")


def invalid(field: str, problem: str) -> InvalidArgument:
    """The error for an argument refused on this side of the wire."""
    return InvalidArgument(f"{field} {problem}", metadata={"field": field})
