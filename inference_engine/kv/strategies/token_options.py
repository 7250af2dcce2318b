"""What strategies that choose tokens by components of keys have in common: defaults and checks of their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_engine.errors import InvalidArgument
from inference_engine.kernels.components import MOST_BITS, RUNS
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategy import require

if TYPE_CHECKING:
    from inference_engine.kv.context import KVContext

LEAST_RANK, BITS, RUN = 16, 3, 4  # components of a key, bits of each, positions that share a rotation
_CHANNELS_OF_RANK = 8  # by default, one component in so many channels, at least LEAST_RANK


def default_rank(geometry: Geometry) -> int:
    largest = max((layer.head_dim for layer in geometry.layers), default=0)
    return min(largest, max(LEAST_RANK, largest // _CHANNELS_OF_RANK))


def trial_rank(geometry: Geometry) -> int:
    """A rank that every layer can have."""
    return min(4, *(layer.head_dim for layer in geometry.layers))


def require_index(bits: int | None, run: int | None) -> None:
    require(bits is None or 1 <= bits <= MOST_BITS, "bits", f"must be from 1 to {MOST_BITS}, got {bits}")
    require(run is None or run in RUNS, "run", f"must be one of {RUNS}, got {run}")


def require_rank(rank: int | None, geometry: Geometry) -> None:
    least = min((layer.head_dim for layer in geometry.layers), default=0)
    require(
        rank is None or not geometry.layers or rank <= least,
        "rank",
        f"must be at most {least}, the head size, got {rank}",
        limit=least,
    )


def require_window(window: int, geometry: Geometry) -> None:
    """Tokens staged together lie within a segment; with a shorter window, one of them could be distant to another."""
    segment = geometry.segment_tokens
    require(
        window >= segment, "window", f"must hold a segment of {segment} tokens, got {window}", segment_tokens=segment
    )


def require_components(context: KVContext, rank: int, field: str, otherwise: str) -> None:
    """Raise InvalidArgument unless components of the model's keys are calibrated, `rank` or more of a key.

    field: the option that asks for them; otherwise: what can be asked for instead.
    """
    layers = [index for index, layer in enumerate(context.geometry.layers) if layer.native_window is None]
    if not context.components:
        raise InvalidArgument(
            field,
            "no components of this model's keys are calibrated; make them with `kakeya train components`, or ask for "
            + otherwise,
        )
    if missing := [layer for layer in layers if layer not in context.components]:
        raise InvalidArgument(
            field, f"the components cover layers {tuple(context.components)}, this model needs {missing[0]}"
        )
    most = min((context.components[layer].rank for layer in layers), default=0)
    require(not layers or rank <= most, "rank", f"the components are {most} a key, got {rank}", limit=most)
