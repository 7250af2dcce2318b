"""The strategies by name. A new one is a file here and a line in `STRATEGIES`, or an installed package of its own.

`check_registry` runs at every start: every registered strategy can be written as text, by people and by clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv import installed
from inference_engine.kv.compressors import COMPRESSORS
from inference_engine.kv.installed import Registry, shown
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.restored import Restored
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.kv.strategy import KVStrategy, Option

STRATEGIES: Registry[type[KVStrategy]] = Registry(
    "strategy",
    installed.STRATEGIES,
    {kind.name: kind for kind in (Full, SinkWindow, LayerWindow, Restored, Gather, Tiered)},
    fits=lambda one: isinstance(one, type) and issubclass(one, KVStrategy),
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_FRACTION = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NUMBERS = tuple[int, ...]
# What an option may be, and how it is written.
_WRITTEN: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "a name of printable characters without commas",
    _NUMBERS: "whole numbers joined by +",
}
MAX_OPTION_TEXT = 1024  # characters of an option


def strategy_names() -> tuple[str, ...]:
    return tuple(STRATEGIES.all())


def strategy_kinds() -> dict[str, type[KVStrategy]]:
    """The class of each strategy, by name."""
    return STRATEGIES.all()


def make_strategy(name: str, **options: Option) -> KVStrategy:
    """The spec of that name with `options`, defaults filled in. Raises InvalidArgument naming what is wrong."""
    _check_known(name, options)
    return STRATEGIES.all()[name](**options)


def read_strategy(name: str, texts: Mapping[str, str]) -> KVStrategy:
    """The spec of that name with options that are given as text. Raises InvalidArgument naming what is wrong."""
    _check_known(name, texts)
    types = option_types(name)
    return make_strategy(name, **{option: _read(option, text, types[option]) for option, text in texts.items()})


def parse_strategy(text: str) -> KVStrategy:
    """`full` or `layer_window:window=512,full_layers=5+11+17`, as people write it. Raises ConfigError."""
    name, _, rest = text.partition(":")
    if (first := name.partition(",")[0].strip()) != name.strip() and STRATEGIES.get(first):
        raise ConfigError(
            f"strategy {text!r}: options come after a colon, as in {first}:{name.partition(',')[2].strip()}"
        )
    texts: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and texts:
            raise ConfigError(
                f"strategy {text!r}: {option!r} is no option with a value; several values of one are joined by +, as "
                "in full_layers=5+11"
            )
        if option in texts:
            raise ConfigError(f"strategy {text!r}: {option} is given twice")
        texts[option] = value
    try:
        return read_strategy(name.strip(), texts)
    except InvalidArgument as error:
        problem = error.description if error.field == "strategy" else error.message
        raise ConfigError(f"strategy {text!r}: {problem}") from error


def option_types(name: str) -> dict[str, object]:
    """What each option of a strategy is: int, float, str or tuple[int, ...]. Empty if there is no such strategy."""
    kind = STRATEGIES.get(name)
    return {} if kind is None else {option: _without_none(hint) for option, hint in _hints(kind).items()}


def check_registry() -> None:
    """Raise ConfigError for a name that is there twice, or a strategy that cannot be written as text and read back."""
    if clashes := (*STRATEGIES.problems, *COMPRESSORS.problems):
        raise ConfigError("; ".join(clashes))
    for name, kind in STRATEGIES.all().items():
        if name != kind.name or not _NAME.fullmatch(name):
            raise ConfigError(
                f"strategy {name!r} of class {kind.__name__} is registered under a name that is not its own, or not of "
                f"the form {_NAME.pattern}; rename it"
            )
        hints = _hints(kind)
        for option in fields(kind):
            if problem := _unwritable(hints[option.name], option.default):
                raise ConfigError(f"strategy {name}: option {option.name} cannot be written as text: {problem}")


def _unwritable(hint: object, default: Any) -> str | None:
    """Why some values of an option cannot be written as text, where an absent option means its default."""
    if _without_none(hint) not in _WRITTEN:
        return f"it is {hint}; int, float, str and tuple[int, ...] can be written, each also with None"
    if default is MISSING:
        return "it has no default, which an absent option stands for"
    if default is not None and _without_none(hint) is not hint:
        return f"None is left out, and would be read as the default, {default!r}; make None the default"
    if isinstance(default, tuple) and default:
        return f"() is left out, and would be read as the default, {default!r}; make () the default"
    if default not in (None, ()) and not _returns(hint, default):
        return f"its default, {default!r}, is not {_WRITTEN[_without_none(hint)]}"
    return None


def _returns(hint: object, value: Option) -> bool:
    """Is a value the same once it is written and read?"""
    try:
        return _read("", str(value), _without_none(hint)) == value
    except InvalidArgument:
        return False


def _check_known(name: str, options: Iterable[str]) -> None:
    if STRATEGIES.get(name) is None:
        raise InvalidArgument("strategy", STRATEGIES.unknown(name))
    known = option_types(name)
    if unknown := sorted(set(options) - set(known)):
        raise InvalidArgument(
            "strategy", f"{name} has no option {shown(unknown[0])}; it has {', '.join(known) or 'none'}"
        )


@cache
def _hints(kind: type[KVStrategy]) -> dict[str, object]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _without_none(hint: object) -> object:
    if get_origin(hint) not in (UnionType, Union):
        return hint
    others = [each for each in get_args(hint) if each is not NoneType]
    return others[0] if len(others) == 1 else hint


def _read(option: str, text: str, kind: object) -> Option:
    """`text` as the option's type says. Raises InvalidArgument."""
    if len(text) > MAX_OPTION_TEXT:
        raise InvalidArgument(option, f"takes at most {MAX_OPTION_TEXT} characters, got {len(text)}")
    try:
        if kind is str and text == text.strip() and text.isprintable() and text and "," not in text:
            return text
        if kind is float and _FRACTION.fullmatch(text):
            return float(text)
        if kind is int and _NUMBER.fullmatch(text):
            return int(text)
        if kind == _NUMBERS and all(_NUMBER.fullmatch(number) for number in text.split("+")):
            return tuple(map(int, text.split("+")))
    except ValueError:  # more digits than int() reads
        pass
    raise InvalidArgument(option, f"must be {_WRITTEN[kind]}, got {shown(text)}")
