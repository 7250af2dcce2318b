"""The interface of mechanisms that belong to a set of alike layers, beside the layers' entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerSet, Layout, Mechanism
from inference_engine.kv.part import Need, Part
from inference_engine.kv.slots import LayerSlots
from inference_engine.kv.views import StagedQueries, StepReads, View


class LayerPart(Part):
    """A block index, or entries that lie outside the regions.

    While it commits, entries that leave are still in the regions (`LayerSlots.leaving`). Its `read` changes the numbers
    of the queries, which so far read every slot that they see.
    """

    def has_numbers(self, queries: StagedQueries, step: StepReads) -> bool:
        """Can these queries read by plan numbers?"""
        return True

    def view(self, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        """The view by which these queries read; inner: the view without this part."""
        return inner()

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
