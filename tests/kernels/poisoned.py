"""New memory that is full of rubbish: what a kernel leaves unwritten then shows in what it gives.

For comparisons in a process of their own (`own_process.py`): what is replaced stays so.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

_new_empty = torch.Tensor.new_empty


def rubbish(made: Tensor) -> Tensor:
    """NaN, or whole numbers that are large and neither 0 nor -1."""
    if made.is_floating_point():
        return made.fill_(float("nan"))
    return made.fill_(True if made.dtype is torch.bool else torch.iinfo(made.dtype).max // 2 + 1)


class Poisoned:
    """torch, whose new memory is full of rubbish."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def empty(*arguments: object, **options: object) -> Tensor:
        made: Tensor = torch.empty(*arguments, **options)  # type: ignore[call-overload]
        return rubbish(made)

    @staticmethod
    def empty_like(*arguments: object, **options: object) -> Tensor:
        made: Tensor = torch.empty_like(*arguments, **options)  # type: ignore[arg-type]
        return rubbish(made)


def poison(*modules: ModuleType) -> None:
    """From now on, all memory that these modules make begins as rubbish."""
    for module in modules:
        assert getattr(module, "torch", torch) is torch, module
        setattr(module, "torch", Poisoned())  # noqa: B010 - not a name that the module exports

    def new_empty(self: Tensor, *arguments: object, **options: object) -> Tensor:
        return rubbish(_new_empty(self, *arguments, **options))  # type: ignore[call-overload]

    torch.Tensor.new_empty = new_empty  # type: ignore[method-assign, assignment]
