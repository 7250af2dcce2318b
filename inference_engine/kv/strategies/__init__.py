"""The strategies by name. A new one is a file here, a line in `_STRATEGIES`, and an arm in the wire contract."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args, get_origin, get_type_hints

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.mac import Mac
from inference_engine.kv.strategies.restored import Restored
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.kv.strategy import KVStrategy, Option

_STRATEGIES: dict[str, type[KVStrategy]] = {
    kind.name: kind for kind in (Full, SinkWindow, LayerWindow, Restored, Gather, Tiered, Mac)
}
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_FRACTION = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?", re.ASCII | re.IGNORECASE)


def strategy_names() -> tuple[str, ...]:
    return tuple(_STRATEGIES)


def strategy_kinds() -> dict[str, type[KVStrategy]]:
    """The class of each strategy, by name."""
    return dict(_STRATEGIES)


def make_strategy(name: str, **options: Option) -> KVStrategy:
    """The spec of that name with `options`, defaults filled in. Raises InvalidArgument naming what is wrong."""
    kind = _STRATEGIES.get(name)
    if kind is None:
        raise InvalidArgument("strategy", f"there is no strategy {name!r}; there are {', '.join(_STRATEGIES)}")
    known = _option_types(name)
    if unknown := sorted(set(options) - set(known)):
        raise InvalidArgument("strategy", f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


def parse_strategy(text: str) -> KVStrategy:
    """`full` or `layer_window:window=512,full_layers=5+11+17`, as people write it. Raises ConfigError."""
    name, _, rest = text.partition(":")
    types = _option_types(name.strip())
    options: dict[str, Option] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        try:
            options[key] = _read(value, types.get(key))
        except ValueError as error:
            raise ConfigError(f"strategy {text!r}: {part!r} is not {error}") from None
    try:
        return make_strategy(name.strip(), **options)
    except InvalidArgument as error:
        raise ConfigError(f"strategy {text!r}: {error.message}") from error


def _option_types(name: str) -> dict[str, object]:
    """Each option's declared type: a number, a text or whole numbers, some of them or None. Empty for no strategy."""
    kind = _STRATEGIES.get(name)
    if kind is None:
        return {}
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _read(value: str, declared: object) -> Option:
    """`value` as the option's type says. Raises ValueError saying what was expected in place of `option=value`."""
    if str in (declared, *get_args(declared)):
        if not value:
            raise ValueError("option=name")
        return value
    if float in (declared, *get_args(declared)):
        if not _FRACTION.fullmatch(value):
            raise ValueError("option=number")
        return float(value)
    numbers = value.split("+")
    is_list = get_origin(declared) is tuple
    if not all(_NUMBER.fullmatch(number) for number in numbers) or not (is_list or len(numbers) == 1):
        raise ValueError("option=number+number+…" if is_list else "option=number")
    return tuple(map(int, numbers)) if is_list else int(value)
