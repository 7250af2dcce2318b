"""Steps of sessions for the kernel in Metal, and what its reference gives for them: on a CPU, and on a Mac's GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.mlx.bridge import as_mlx
from inference_engine.kernels.mlx.ragged_attention import attend_ragged, lines_of, parts_of
from inference_engine.kernels.ragged_attention import attend_ragged as attend_in_torch
from inference_engine.kernels.reads import PREFIX_HEAD_SLOTS, PREFIX_START, START, AttentionCall
from inference_engine.kv.layout import LayerRule, Layout
from inference_engine.kv.numbers import RegionLines
from tests.kernels.test_ragged_attention import geometry, held, layouts

# Query heads, KV heads, numbers of a head: groups that one threadgroup takes and that several take, sizes that are no
# multiple of a simdgroup's lanes, and one for which a head's numbers leave room for four heads.
SHAPES = [(9, 3, 64), (14, 2, 24), (2, 2, 8), (16, 1, 128), (8, 1, 256), (5, 1, 80)]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """keys, values: the pool's, NaN but for old entries that some query sees. whole: both, new ones written."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    new_keys: Tensor
    new_values: Tensor
    regions: NDArray[np.int64]
    sessions: list[tuple[slice, int]]
    whole: tuple[Tensor, Tensor]
    scaling: float

    def found(self, *, softcap: float | None = None) -> Tensor:
        """By the kernel."""
        lines = lines_of(self.regions[None], self.sessions)
        given = self.queries, torch.cat((self.keys, self.values), dim=1), self.new_keys, self.new_values
        queries, entries, new_keys, new_values = map(as_mlx, given)
        (parts,) = parts_of(lines)
        words: dict[str, Any] = {"parts": parts, "scaling": self.scaling, "softcap": softcap}
        out = attend_ragged(queries, entries, new_keys, new_values, mx.array(lines[0]), **words)
        return torch.from_numpy(np.array(out.astype(mx.float32)))

    def expected(self, *, softcap: float | None = None) -> Tensor:
        """By the reference, in float32."""
        keys, values = self.whole
        return attend_in_torch(
            AttentionCall(
                self.queries.float(),
                keys.float(),
                values.float(),
                torch.from_numpy(self.regions),
                kv_heads=self.new_keys.shape[1],
                scaling=self.scaling,
                softcap=softcap,
            )
        )


def attention_step(
    shape: tuple[int, int, int], dtype: torch.dtype, *, longest: int = 200, seed: int = 0
) -> AttentionStep:
    """A step of sessions of all layouts and of forks, with one to eight new tokens each."""
    query_heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    own = geometry(None, kv_heads, query_heads, dim)
    full = Layout.of(LayerRule(), own, None, longest + 8)
    cases = [(layout, 0, length, new) for _, layout in layouts() for length, new in _lengths(layout)]
    cases += [(full, base, longest - 7 * base // 8, new) for base, new in ((0, 1), (17, 3), (40, 8))]

    pool = sum(layout.region for layout, *_ in cases) * kv_heads + 64
    made = [torch.randn(pool, dim, generator=generator).to(dtype) for _ in range(2)]
    poisoned = [torch.full((pool, dim), float("nan"), dtype=dtype) for _ in range(2)]
    whole = [torch.zeros(pool, dim, dtype=dtype) for _ in range(2)]
    rows, lines, sessions, places = 0, [], [], []
    start, heads = 64, np.arange(kv_heads)[:, None]
    for layout, base, length, new in cases:
        queries, slots = np.arange(length - new, length), np.arange(min(length, layout.capacity))
        positions = held(layout, length)[slots]
        line = RegionLines(layout).of(queries, last=length - 1, count=len(slots))
        region = start + heads * layout.region
        if base:  # the lender's region is the end of the fork's own here
            fork = layout.behind(base, own, longest + 8)
            line = RegionLines(fork).of(queries, last=length - 1, count=length)
            line[:, PREFIX_START], line[:, PREFIX_HEAD_SLOTS] = start + kv_heads * fork.region, base
            vectors = np.where(
                slots < base,
                start + kv_heads * fork.region + heads * base + slots,
                start + heads * fork.region + slots - base,
            )
        else:
            vectors = region + slots
        line[:, START] = start
        seen = layout.visible(queries, positions).any(axis=0)
        old = torch.from_numpy(vectors[:, seen & (positions < queries[0])].reshape(-1))
        for given, hidden, all_of in zip(made, poisoned, whole, strict=True):
            hidden[old] = given[old]
            everything = torch.from_numpy(vectors[:, positions >= 0].reshape(-1))
            all_of[everything] = given[everything]
        slot_of = {int(position): slot for slot, position in enumerate(positions)}
        places.append(torch.from_numpy(vectors[:, [slot_of[int(position)] for position in queries]].T))
        lines.append(line)
        sessions.append((slice(rows, rows + new), length - new))
        rows += new
        start += kv_heads * layout.region
    written = torch.cat(places)
    return AttentionStep(
        queries=torch.randn(rows, query_heads, dim, generator=generator).to(dtype),
        keys=poisoned[0],
        values=poisoned[1],
        new_keys=whole[0][written],
        new_values=whole[1][written],
        regions=np.concatenate(lines),
        sessions=sessions,
        whole=(whole[0], whole[1]),
        scaling=dim**-0.5,
    )


def _lengths(layout: Layout) -> list[tuple[int, int]]:
    """Lengths of histories, and how many of their tokens are new: the first, some where a ring begins anew, others."""
    wanted = [(1, 1), (8, 8), (17, 1), (63, 3), (199, 7)]
    return [(length, new) for length, new in wanted if layout.window is not None or length <= layout.capacity]
