"""What a family is: its model types, what it reads of their configuration, and how the list of a step is written."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from inference_engine.models.operations import NoStepListError

if TYPE_CHECKING:
    from inference_engine.models.families.list_writer import ListWriter

Scalar = int | float | bool | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """What a family's list is made of, of a text model's configuration, under transformers' names.

    Families add fields of their own. One with a default may be absent or None in a configuration.
    """

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float


C = TypeVar("C", bound=TextConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family(Generic[C]):
    """One file of this folder. write: makes the list of a model with a configuration."""

    model_types: tuple[str, ...]
    config: type[C]
    write: Callable[[ListWriter, C], None]

    def read(self, config: Any) -> dict[str, Scalar]:
        """The fields of its configuration. config: transformers'. Raises NoStepListError."""
        hints, found = typing.get_type_hints(self.config), {}
        for each in fields(self.config):
            kinds = typing.get_args(hints[each.name]) or (hints[each.name],)
            value = getattr(config, each.name, None)
            value = each.default if value is None and each.default is not MISSING else value
            try:
                found[each.name] = None if value is None and types.NoneType in kinds else kinds[0](value)
            except (TypeError, ValueError) as error:
                raise NoStepListError(f"its configuration cannot be read: {each.name} is {value!r}") from error
        return found

    def made(self, values: Mapping[str, Scalar]) -> C:
        """The configuration of such fields."""
        return self.config(**typing.cast("dict[str, Any]", values))
