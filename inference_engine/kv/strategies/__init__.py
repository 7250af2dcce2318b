"""The strategies by name. A new one is a file here, a line in `_STRATEGIES`, and an arm in the wire contract."""

from __future__ import annotations

from dataclasses import fields

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy

_STRATEGIES: dict[str, type[KVStrategy]] = {kind.name: kind for kind in (Full, SinkWindow)}


def strategy_names() -> tuple[str, ...]:
    return tuple(_STRATEGIES)


def make_strategy(name: str, **options: int) -> KVStrategy:
    """The spec of that name with `options`, defaults filled in. Raises InvalidArgument naming what is wrong."""
    kind = _STRATEGIES.get(name)
    if kind is None:
        raise InvalidArgument("strategy", f"there is no strategy {name!r}; there are {', '.join(_STRATEGIES)}")
    known = [spec.name for spec in fields(kind)]
    if unknown := sorted(set(options) - set(known)):
        raise InvalidArgument("strategy", f"{name} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind(**options)


def parse_strategy(text: str) -> KVStrategy:
    """`full` or `sink_window:sink=4,window=1024`, as people write it. Raises ConfigError."""
    name, _, rest = text.partition(":")
    options: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value.strip().lstrip("-").isdigit():
            raise ConfigError(f"strategy {text!r}: {part!r} is not option=number")
        options[key.strip()] = int(value)
    try:
        return make_strategy(name.strip(), **options)
    except InvalidArgument as error:
        raise ConfigError(f"strategy {text!r}: {error.message}") from error
