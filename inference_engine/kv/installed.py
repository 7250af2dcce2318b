"""Registries: what this package has by name, and what other installed packages add by their entry points.

    [project.entry-points."kakeya.strategies"]      of a package's pyproject.toml
    tova = "kakeya_tova:Tova"

The object that an entry point names is one variant, or a tuple of them; each is known by its own `name`. What cannot be
imported is left out with a sentence that names it, and refused with that sentence when it is asked for. A name that is
there twice is refused when an engine starts (`problems`).
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

STRATEGIES, COMPRESSORS = "kakeya.strategies", "kakeya.compressors"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found(Generic[T]):
    added: dict[str, tuple[T, str]]  # by name, with the package it is of
    broken: dict[str, str]  # by entry point: why there is nothing
    clashes: tuple[str, ...]


class Registry(Generic[T]):
    """Variants of one kind by name. own: this package's. Entry points are read when a name is first asked for."""

    def __init__(self, what: str, group: str, own: Mapping[str, T], *, fits: Callable[[Any], bool]) -> None:
        """what: the word for one, in errors. fits: is an object one of them?"""
        self.what, self.group, self.own = what, group, dict(own)
        self._fits = fits

    def all(self) -> dict[str, T]:
        """Our own first, then those of installed packages."""
        return self.own | {name: one for name, (one, _) in self._found.added.items() if name not in self.own}

    def get(self, name: str) -> T | None:
        return self.own.get(name) or self.all().get(name)

    def package(self, name: str) -> str:
        """The installed package and version that adds this name; "": it is our own."""
        return "" if name in self.own or name not in self._found.added else self._found.added[name][1]

    def unknown(self, name: str) -> str:
        """What to say to who asks for a name that is not there."""
        close = [f" (did you mean {one}?)" for one in get_close_matches(name[:64], self.all(), n=1)]
        said = self._found.broken.get(name) or f"there is no {self.what} {shown(name)}{''.join(close)}"
        others = [why for point, why in self._found.broken.items() if point != name]
        return "; ".join([f"{said}; there are {', '.join(self.all())}", *others])

    @property
    def problems(self) -> tuple[str, ...]:
        """Names that are there twice. Nothing starts with them."""
        return self._found.clashes

    @property
    def broken(self) -> Mapping[str, str]:
        """By name of the entry point, a sentence for each that gives nothing."""
        return self._found.broken

    @cached_property
    def _found(self) -> _Found[T]:
        added: dict[str, tuple[T, str]] = {}
        broken: dict[str, str] = {}
        clashes: list[str] = []
        for point in importlib.metadata.entry_points(group=self.group):
            package = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
            try:
                loaded = point.load()
                named = {self._name(one): one for one in (loaded if isinstance(loaded, tuple) else (loaded,))}
            except Exception as error:  # whatever another's code does when it is imported
                broken[point.name] = (
                    f"{self.what} {point.name} of the installed package {package} cannot be used: "
                    f"{type(error).__name__}: {error}"
                )
                logger.warning("%s", broken[point.name])
                continue
            for name, one in named.items():
                if name in self.own or name in added:
                    other = "this runtime" if name in self.own else added[name][1]
                    clashes.append(f"{self.what} {name} is in {other} and in {package}; uninstall one of them")
                else:
                    added[name] = one, package
        return _Found(added=added, broken=broken, clashes=tuple(clashes))

    def _name(self, one: Any) -> str:
        if not self._fits(one):
            raise TypeError(f"{one!r} is no {self.what}")
        return str(one.name)


def plugin_distributions() -> list[importlib.metadata.Distribution]:
    """The installed packages that add strategies or compressors, each once."""
    points = [point for group in (STRATEGIES, COMPRESSORS) for point in importlib.metadata.entry_points(group=group)]
    return list({point.dist.name: point.dist for point in points if point.dist is not None}.values())


_SHOWN_TEXT = 64


def shown(text: str) -> str:
    """`text` as errors repeat it: quoted, and not at length."""
    return repr(text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + "…")
