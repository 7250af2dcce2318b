"""The shape of a DFlash drafter, and the properties of its target that it depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from kv_cache_proposer.drafter_errors import DrafterError

MOST = 2**24  # of any size: what a damaged configuration holds is no reason to make tensors of it


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig:
    """hidden, embedding_scale: the target's; its raw embeddings times the scale are what the drafter reads.

    tap_layers: the target's layers whose outputs it sees, ascending. block_size: the last token and the masks after
    it. mask_token_id: an id of the target's that texts do not contain. context_window: positions before the block that
    it may look at. chain: width of the module that conditions a draft token on the one before it; 0: none, as in
    published drafters.

    windows: of each layer, how many positions a query sees, its own included; 0: all. causal: of each layer, whether a
    place of the block sees none behind it. Empty: every layer sees the whole context and block.
    """

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tap_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    context_window: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    embedding_scale: float = 1.0
    chain: int = 0
    windows: tuple[int, ...] = ()
    causal: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "tap_layers":
                is_right = are_layers(value)
            elif spec.name in ("windows", "causal"):
                # Narrower than a block, a window would hide places of the block from one another.
                is_right = len(value) in (0, self.layers) and all(
                    isinstance(one, bool) if spec.name == "causal" else one == 0 or one >= self.block_size
                    for one in value
                )
            elif spec.name in ("mask_token_id", "chain"):
                is_right = type(value) is int and value >= 0
            elif spec.name in ("rope_theta", "norm_eps", "embedding_scale"):
                is_right = isinstance(value, (int, float)) and 0 < value < math.inf
            else:
                is_right = type(value) is int and 0 < value <= MOST
            if not is_right:
                raise DrafterError(f"a drafter's {spec.name} cannot be {value!r}")
        if self.block_size < 2:
            raise DrafterError(f"a drafter's block_size must be at least 2, got {self.block_size}")
        if self.query_heads % self.kv_heads or self.head_dim % 2:
            raise DrafterError(
                f"a drafter needs a multiple of its {self.kv_heads} K/V heads as query heads and an even head_dim, "
                f"got {self.query_heads} and {self.head_dim}"
            )

    @property
    def reaches(self) -> tuple[tuple[int, bool], ...]:
        """Of each layer, its window (0: none) and whether it is causal."""
        none = (0,) * self.layers
        return tuple(
            (window, bool(causal)) for window, causal in zip(self.windows or none, self.causal or none, strict=True)
        )

    @staticmethod
    def from_json(content: Any) -> DFlashConfig:
        """Raises DrafterError for what is missing or unknown."""
        try:
            lists = {name: tuple(content.get(name, ())) for name in ("tap_layers", "windows", "causal")}
            return DFlashConfig(**{**content, **lists})
        except (KeyError, TypeError) as error:
            raise DrafterError(f"not a drafter's configuration: {type(error).__name__}: {error}") from error


def are_layers(value: tuple[object, ...]) -> bool:
    """Are these numbers of layers, ascending?"""
    numbers = [one for one in value if type(one) is int and one >= 0]
    return bool(numbers) and list(value) == sorted(set(numbers))


def spread_layers(count: int, target_layers: int) -> tuple[int, ...]:
    """`count` layers of the target, evenly apart from the second to the third last: where DFlash reads by default.

    Where those are too few, all are there to choose from. Raises DrafterError if these are, too.
    """
    if not 1 <= count <= target_layers:
        raise DrafterError(f"a drafter can read from 1 to {target_layers} layers of this model, not {count}")
    first, last = (1, target_layers - 3) if count <= target_layers - 3 else (0, target_layers - 1)
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(first + step * (last - first) / (count - 1)) for step in range(count))
