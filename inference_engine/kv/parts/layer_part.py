"""The interface of mechanisms that belong to a set of alike layers, beside the layers' entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Mechanism, Positions
from inference_engine.kv.part import Need, Part
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import StagedQueries, StepReads, View


class LayerPart(Part):
    """A block index, or entries that lie outside the regions."""

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        """Can these queries read by plan numbers?"""
        return True

    def amend(self, queries: StagedQueries, step: StepReads) -> int:
        """Change the numbers of these queries, which so far read all slots of the regions.

        Returns until which position it does so alike, as `read` does.
        """
        return queries.first

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        """The view by which these queries read; inner: the view without this part."""
        return inner()

    def earlier_entries(self) -> Iterator[tuple[Positions, Tensor, Tensor]]:
        """Entries before those of the regions: positions, keys and values [layers, n, Hkv, D], a chunk at a time."""
        return iter(())

    def leave(self, positions: Positions) -> None:
        """These positions are about to be wiped from the regions. Raises RestorationFailed."""

    def release(self) -> None:
        """Nothing to do: its memory is released with its layers."""


class LayerMechanism(Mechanism, ABC):
    """A mechanism with its part, which is opened with the entries of the layers that it belongs to."""

    @abstractmethod
    def need(self, geometry: Geometry, layers: LayerSet, layout: Layout) -> Need:
        """The memory that it takes beside the regions of its layers."""

    @abstractmethod
    def open(self, slots: LayerSlots, starts: Sequence[int]) -> LayerPart:
        """Its part, for layers that are reserved. starts: the first buffer vector of each of its demands.

        Raises Overloaded if the second tier has no room after all.
        """


def mechanisms_of(layout: Layout) -> list[LayerMechanism]:
    """Those of layers that are laid out so."""
    found = []
    for mechanism in layout.mechanisms:
        assert isinstance(mechanism, LayerMechanism), f"{mechanism} has no part"
        found.append(mechanism)
    return found
