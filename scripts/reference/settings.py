"""The page of settings: every field of the three settings objects, as flags, variables and file keys name it."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import fields

from inference_engine.cli.settings import HELP, TITLES
from scripts.reference.markdown import code, page, table

INTRODUCTION = """
    A setting is looked up in this order, first hit wins: the flag (`--kv-bytes 4GiB`), the environment
    (`KAKEYA_KV_BYTES=4GiB`), a TOML file (`--config FILE` or `KAKEYA_CONFIG`; keys as below), the default. Sizes are
    bytes or text with `kB`, `MB`, `GB`, `TB`, `KiB`, `MiB`, `GiB`, `TiB`; durations are seconds; lengths are tokens.
"""


def render() -> str:
    tables = [f"## {title.capitalize()}\n\n{table(HEADER, _rows(kind))}" for kind, title in TITLES.items()]
    return page("Settings", "inference_engine/config.py and inference_engine/cli/settings.py", INTRODUCTION, *tables)


MIB = 2**20
HEADER = ("setting", "takes", "default", "says")


def _rows(kind: type) -> Iterator[tuple[str, str, str, str]]:
    for field in fields(kind):
        takes, says = HELP[field.name]
        yield code(field.name), code(takes), code(_typed(field.default, takes)) or "empty", says


def _typed(default: object, takes: str) -> str:
    """A default as it would be typed."""
    match default:
        case enum.Enum():
            return str(default.value)
        case bool():
            return str(default).lower()
        case int() if takes == "SIZE" and default and default % MIB == 0:
            return f"{default // MIB}MiB"
        case float():
            return f"{default:.0f}" if default.is_integer() else f"{default:g}"
    return str(default)
