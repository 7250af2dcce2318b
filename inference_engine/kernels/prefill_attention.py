"""Prefill attention of long chunks, by the fastest operations that the device has.

FlashAttention-3, where it is installed, takes any chunk in one operation (`kernels/flash3.py`). Otherwise the fused
operations that come with torch are used:

    positions   0 … 32767 | … 36863 | 36864 … 38000 | 38001 … 42096        a chunk of 4,096 at the end of 42,097
    attended    whole     | whole   | whole, rest   | causal, the chunk itself

Of the history, pieces of a few sizes are attended to as wholes, then what is left of it; the chunk attends to itself.
The states are merged by their log-sum-exps (`kernels/merge.py`). On Hopper, cuDNN's operations take half the time of
torch's own, but they need a plan for each shape, which takes longer to make than to run: hence the few sizes,
contiguous copies of pieces, and chunks of whole multiples of `_CHUNK` alone. The rest, of any size, is torch's own
flash attention's. Other chunks are attended to as `kernels/attention.py` has it.
Where old entries come piece by piece (`kv/views.py`), pieces, and recent entries, are attended to in the same way.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from inference_engine.kernels.attention import attend_causal
from inference_engine.kernels.flash3 import FlashChunks, by_flash3, why_absent
from inference_engine.kernels.merge import attend_causal_state, attend_state, by_flash, merge_states

logger = logging.getLogger(__name__)

# out [T, Hq, D] · lse [T, Hq] float32, both of any strides but out's last.
State = tuple[Tensor, Tensor]
# (queries [1, Hq, T, D], keys and values [1, Hkv, S, D], scaling) -> state
Attend = Callable[[Tensor, Tensor, Tensor, float], State]


class AttendEntries(Protocol):
    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """The state of queries [T, Hq, D] over entries [Hkv, S, D].

        Of a piece, contiguous, each query sees all, and on a GPU out may have the dtype of the keys; or as
        `attend_causal_state`.
        """


class MergeTwo(Protocol):
    def __call__(self, first: State, second: State, dtype: torch.dtype) -> State:
        """The state of both sets of entries, neither empty, contiguous; out is rounded to `dtype`."""


PIECES = (32768, 16384, 8192, 4096)  # entries
_CHUNK = 1024  # queries
_LEAST = 128  # queries, as many as a tile of FlashAttention-3 has
# Queries, and entries before them, of the trial: those of most prefills, and odd ones.
TRIED = ((4096, 0), (4096, PIECES[-1]), (4096, sum(PIECES) + 101), (3001, 7083))
_WORST = 2e-2  # in half precision: of the largest number; of an lse itself, which is the exponent of a weight
# What an operation raises that is missing, or that was built for another torch.
_FAULTS = (RuntimeError, ImportError, OSError, AttributeError, TypeError, ValueError, AssertionError)


def merge_two(first: State, second: State, dtype: torch.dtype) -> State:
    """See `MergeTwo`."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    out, lse = merge_states(out_a.float(), lse_a, out_b.float(), lse_b)
    return out.to(dtype).contiguous(), lse.contiguous()


def attend_piece(
    queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
) -> State:
    """See `AttendEntries`, of a piece."""
    return attend_state(queries, keys, values, None, scaling=scaling, softcap=softcap)


def by_cudnn(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool) -> State:
    """Every query sees every key; is_causal: of as many keys as queries, those up to its own."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, scale=scaling
    )
    return out[0].transpose(0, 1), lse.reshape(queries.shape[1], queries.shape[2]).T


class LongAttention(ABC):
    """Implements CausalAttention, and by methods AttendEntries.

    What does not fit the operation is attended to as elsewhere; so is everything after the operation failed.
    """

    name: ClassVar[str]
    # From how much work of a chunk in a layer on, its queries by their entries by the numbers of a query, it is faster
    # than the operation over regions, where the host launches it between graphs. None: never.
    least_work: ClassVar[int | None] = None

    def __init__(self) -> None:
        self._works = True
        # Of the chunks of a recorded step, within it; None: they are attended to between its graphs.
        self.chunks: type[FlashChunks] | None = None

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor | None:
        """`attend_causal`; None: they do not fit."""

    @abstractmethod
    def state(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool) -> State | None:
        """`attend_causal_state`, or that of entries which each query sees; None: they do not fit."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
    ) -> Tensor:
        if head_sinks is None and self._is_asked(queries, keys, softcap):
            with self._giving_up(queries):
                if (out := self.attend(queries, keys, values, scaling)) is not None:
                    return out
        return attend_causal(queries, keys, values, scaling=scaling, softcap=softcap, head_sinks=head_sinks)

    def attend_piece(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """Implements AttendEntries, of a piece."""
        if self._is_asked(queries, keys, softcap):
            with self._giving_up(queries):
                if (state := self.state(queries, keys, values, scaling, is_causal=False)) is not None:
                    return state
        return attend_state(queries, keys, values, None, scaling=scaling, softcap=softcap)

    def attend_causal_state(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """Implements AttendEntries, as `attend_causal_state`."""
        if self._is_asked(queries, keys, softcap):
            with self._giving_up(queries):
                if (state := self.state(queries, keys, values, scaling, is_causal=True)) is not None:
                    return state
        return attend_causal_state(queries, keys, values, scaling=scaling, softcap=softcap)

    def _is_asked(self, queries: Tensor, keys: Tensor, softcap: float | None) -> bool:
        is_fitting = len(queries) > 0 and keys.shape[1] > 0 and keys.dtype == queries.dtype
        return self._works and is_fitting and softcap is None

    @contextmanager
    def _giving_up(self, queries: Tensor) -> Iterator[None]:
        """For an operation that is not asked again once it failed. Memory that is missing is not its fault."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._works = False
            logger.warning(
                "%s attends to no more long chunks: with %d queries of %d heads it says %s",
                self.name,
                len(queries),
                queries.shape[1],
                error,
            )


class Flash3(LongAttention):
    """Any lengths, in one operation."""

    name = "FlashAttention-3"
    least_work = 2**32

    def __init__(self, *, least: int = _LEAST) -> None:
        """least: fewer queries do not fit."""
        super().__init__()
        self._least = least
        self.chunks = FlashChunks

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor | None:
        state = self.state(queries, keys, values, scaling, is_causal=True)
        return None if state is None else state[0]

    def state(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool) -> State | None:
        if len(queries) < self._least or queries.dtype != torch.bfloat16:
            return None
        return by_flash3(queries, keys, values, scaling, is_causal=is_causal)


class LongChunks(LongAttention):
    """By pieces."""

    name = "cuDNN"

    def __init__(
        self,
        whole: Attend,
        square: Attend,
        rest: Attend,
        *,
        merge: MergeTwo = merge_two,
        pieces: Iterable[int] = PIECES,
        chunk: int = _CHUNK,
    ) -> None:
        """whole: every query sees every key, of a piece. square: a chunk sees itself, each token up to its own place.
        rest: as `whole`, of any number of keys. pieces: sizes, the largest first. chunk: it serves chunks that are a
        multiple of it.
        """
        super().__init__()
        self._whole, self._square, self._rest, self._merge = whole, square, rest, merge
        self._pieces, self._chunk = tuple(pieces), chunk

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor | None:
        by_head, history = queries.transpose(0, 1)[None], keys.shape[1] - len(queries)
        if len(queries) % self._chunk or 0 < history < self._pieces[-1]:
            return None
        state: State | None = None
        for first, end in self._cut(history):
            attend = self._whole if end - first in self._pieces else self._rest
            own = attend(by_head, _part(keys, first, end), _part(values, first, end), scaling)
            state = own if state is None else self._merge(state, own, torch.float32)
        end = history + len(queries)
        last = self._square(by_head, _part(keys, history, end), _part(values, history, end), scaling)
        return (last if state is None else self._merge(state, last, queries.dtype))[0]

    def state(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool) -> State | None:
        count, length = len(queries), keys.shape[1]
        if count % self._chunk or (length != count if is_causal else length not in self._pieces):
            return None
        attend = self._square if is_causal else self._whole
        return attend(queries.transpose(0, 1)[None], _part(keys, 0, length), _part(values, 0, length), scaling)

    def _cut(self, history: int) -> Iterator[tuple[int, int]]:
        """Pieces of it, the largest first, and what is left."""
        first = 0
        for size in self._pieces:
            while history - first >= size:
                yield first, first + size
                first += size
        if first < history:
            yield first, history


def _part(entries: Tensor, first: int, end: int) -> Tensor:
    return entries[None, :, first:end].contiguous()


def fault_of(
    found: LongAttention,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    *,
    tried: Iterable[tuple[int, int]] = TRIED,
) -> str:
    """What is wrong with an operation for heads of this shape; nothing: it is right. tried: queries, entries before."""
    heads, kv_heads, dim = shape
    generator, scaling = torch.Generator(device).manual_seed(0), dim**-0.5
    for count, history in tried:
        length = history + count
        queries, keys, values = (
            torch.randn(shape, generator=generator, device=device, dtype=dtype)
            for shape in ((count, heads, dim), (kv_heads, length, dim), (kv_heads, length, dim))
        )
        before = (keys[:, :history].contiguous(), values[:, :history].contiguous())
        try:
            out = found.attend(queries, keys, values, scaling)
            causal = found.state(queries, keys, values, scaling, is_causal=True)
            whole = found.state(queries, before[0], before[1], scaling, is_causal=False) if history else None
        except _FAULTS as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        differences: list[Tensor] = []
        if out is not None:
            differences.append(_share(out, attend_causal(queries, keys, values, scaling=scaling)))
        if causal is not None:
            differences.extend(_shares(causal, attend_causal_state(queries, keys, values, scaling=scaling)))
        if whole is not None:
            differences.extend(_shares(whole, attend_state(queries, *before, None, scaling=scaling)))
        for worst in map(float, differences):
            if not worst < _WORST:
                return f"of {count} queries behind {history} entries it differs by a share of {worst:.2g}"
    return ""


def fault_of_chunks(found: LongAttention, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> str:
    """As `fault_of`, of two chunks within one step: the second lies at a pool's end, its heads at another distance.

    What lies behind their entries is another session's, and is no number here: an operation that loads whole tiles
    multiplies it with zeros, and gives none either.
    """
    assert found.chunks is not None
    heads, kv_heads, dim = shape
    generator, scaling = torch.Generator(device).manual_seed(1), dim**-0.5
    vectors, rows, longest = 300_000, 288, 9000
    pool = torch.full((vectors, 2 * dim), torch.nan, device=device, dtype=dtype)
    keys, values = pool[:, :dim], pool[:, dim:]
    queries = torch.randn((rows, heads, dim), generator=generator, device=device, dtype=dtype)
    table = [[3, 132, 70_001, 1500, 1401], [133, 281, vectors - kv_heads * longest, longest, longest - 50]]
    for _, _, start, apart, used in table:
        for begin in range(start, start + kv_heads * apart, apart):
            pool[begin : begin + used].normal_(generator=generator)
    try:
        chunks = found.chunks(torch.tensor([table], device=device), rows, (kv_heads,), vectors, longest)
        out = chunks.attend(0, queries, keys, values, scaling)
        for first, end, start, apart, used in table:
            each = [
                part.as_strided(
                    (kv_heads, used, dim), (apart * 2 * dim, 2 * dim, 1), part.storage_offset() + start * 2 * dim
                )
                for part in (keys, values)
            ]
            worst = float(_share(out[first:end], attend_causal(queries[first:end], *each, scaling=scaling)))
            if not worst < _WORST:
                return f"of {end - first} queries by {used} entries it differs by a share of {worst:.2g}"
    except _FAULTS as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return "" if not out[rows - 1].any() else "a row of no chunk is not zeros"


def open_long_chunks(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, int, int]],
    merge: MergeTwo = merge_two,
    *,
    trial: Callable[[LongAttention, torch.device, torch.dtype, tuple[int, int, int]], str] = fault_of,
    trial_of_chunks: Callable[[LongAttention, torch.device, torch.dtype, tuple[int, int, int]], str] = fault_of_chunks,
) -> LongAttention | None:
    """What attends to long chunks on this device: tried once for each shape (Hq, Hkv, D) of the model's layers.

    FlashAttention-3, or cuDNN; None where neither is there and right: torch's own. The log says which, and why not a
    faster one. merge: of the states of pieces. trial, trial_of_chunks: what is wrong with an operation.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if absent := why_absent(device, dtype):
        logger.debug("%s does not attend to long chunks: %s", Flash3.name, absent)
    cudnn = LongChunks(
        partial(by_cudnn, is_causal=False),
        partial(by_cudnn, is_causal=True),
        partial(by_flash, is_causal=False),
        merge=merge,
    )
    tried: tuple[LongAttention, ...] = (cudnn,) if absent else (Flash3(), cudnn)
    shapes, refused, chosen = tuple(dict.fromkeys(shapes)), "", None
    for found in tried:
        faults = ((shape, trial(found, device, dtype, shape)) for shape in shapes)
        fault = next((each for each in faults if each[1]), None)
        if fault is None:
            chosen = found
            break
        refused += f"; not {found.name}, with heads {fault[0]}: {fault[1]}"
    if chosen is not None and chosen.chunks is not None:
        of_chunks = {trial_of_chunks(chosen, device, dtype, shape) for shape in shapes} - {""}
        if of_chunks:
            logger.info("%s attends to no chunks within recorded steps: %s", chosen.name, "; ".join(of_chunks))
            chosen.chunks = None
    torch.cuda.empty_cache()  # what the trial took is room for entries
    name = "torch's flash attention" if chosen is None else chosen.name
    logger.log(logging.INFO if refused else logging.DEBUG, "%s attends to long chunks%s", name, refused)
    return chosen


def _shares(found: State, expected: State) -> tuple[Tensor, Tensor]:
    return _share(found[0], expected[0]), (found[1] - expected[1]).abs().max()


def _share(found: Tensor, expected: Tensor) -> Tensor:
    """The largest difference, as a share of the largest number."""
    return (found.float() - expected.float()).abs().max() / expected.float().abs().max()
