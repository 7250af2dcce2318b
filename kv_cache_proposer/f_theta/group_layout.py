"""How K and V of one token lie in a vector: layer by layer, K before V, head by head; layers in groups.

    group 0                                                       group 1
    | layer 0: K head 0 … K head Hkv-1, V head 0 … V head Hkv-1 | layer 1: … |   | layer 10: … |

A group has a basis of its own. Layers lie side by side in it, so that one of them can be restored by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.codec_errors import LatentError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """A layer the latent covers. `layer` is its index in the model."""

    layer: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers in one KV entry: K and V of one token."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a basis."""

    shapes: tuple[LayerShape, ...]

    @property
    def width(self) -> int:
        return sum(shape.width for shape in self.shapes)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Numbers of each head's K, then of each head's V, layer by layer."""
        return tuple(shape.head_dim for shape in self.shapes for _ in range(2 * shape.kv_heads))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer begins in the vector."""
        return tuple(accumulate((shape.width for shape in self.shapes[:-1]), initial=0))


def make_groups(shapes: Sequence[LayerShape], group_layers: int) -> tuple[Group, ...]:
    """Neighbouring layers, in groups of at most `group_layers` whose sizes differ by one at most."""
    if not shapes or group_layers < 1:
        raise LatentError(f"a latent needs layers and group_layers ≥ 1, got {len(shapes)} layers in {group_layers}s")
    count = -(-len(shapes) // group_layers)
    starts = [index * len(shapes) // count for index in range(count + 1)]
    return tuple(Group(tuple(shapes[a:b])) for a, b in pairwise(starts))


def join(group: Group, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """KV entries of the group's layers, each [n, Hkv, D] of any float dtype, as float32 vectors [n, width]."""
    for shape, key, value in zip(group.shapes, keys, values, strict=True):
        for part, states in (("keys", key), ("values", value)):
            if states.shape[1:] != (shape.kv_heads, shape.head_dim):
                raise LatentError(
                    f"layer {shape.layer}: {part} must be [n, {shape.kv_heads}, {shape.head_dim}], "
                    f"got {list(states.shape)}"
                )
    parts = [states for pair in zip(keys, values, strict=True) for states in pair]
    if len({states.shape for states in parts}) == 1:
        # One operation, not two for each layer's keys and values.
        return torch.stack(parts, dim=1).float().flatten(1)
    return torch.cat([states.float().flatten(1) for states in parts], dim=1)
