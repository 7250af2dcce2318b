"""How a query of a step reads: a typed record, of which its line of integers and the kernel that serves it are made.

    header   START … SINK_FLOOR  the region, and what of it is seen      KIND  which record
             PREFIX_START, PREFIX_HEAD_SLOTS, BASE                       the prefix of a fork, of any kind
    own      words whose names are the record's own

A region is `HEAD_SLOTS` consecutive buffer vectors for each KV head, from `START` on. Numbers say what a query sees
there, so nothing as long as a history is built on the host or copied, and a step's shapes do not depend on lengths:

    slot       0 … sink-1 | sink … count-1
    position   its number | the last one up to `last` that falls there, `ring` apart (ring 0: its number)
    seen       from sink_floor on | from max(floor, sink) on, and both up to `upto`

The first entries of a fork lie in another session's region: slots before `base` are in a region of `prefix_head_slots`
vectors for each KV head from `prefix_start` on, and the fork's own region begins with slot `base`.

A record names its own words, and for each executor the function that serves queries which read so. Its type is what
executors dispatch by, what they say that they support, and part of what a recorded step is known by. So a new way of
reading is a record and its kernels; what is between a part that writes lines and a kernel that reads them stays.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import BackendError
from inference_engine.kernels.components import IndexShape

START, HEAD_SLOTS, COUNT, SINK, RING, LAST, UPTO, FLOOR, SINK_FLOOR = range(9)
KIND, PREFIX_START, PREFIX_HEAD_SLOTS, BASE = range(9, 13)
_OWN = 13  # the first of a record's own words
FIELDS = 20

_kinds: dict[int, str] = {}  # the record of each, by its full name


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRecord(ABC):
    """What queries that read in one way have in common; hashable, so that a step is recorded once for all of them.

    NUMBER: what is in the word KIND of its lines; the runtime's own are below 16. WORDS: names of its own words.
    KERNELS: by executor, `module:function` of a ReadKernel; an executor that is not named does not support it.
    """

    NUMBER: ClassVar[int]
    WORDS: ClassVar[tuple[str, ...]] = ()
    KERNELS: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        taken = _kinds.setdefault(cls.NUMBER, name)
        assert taken == name, f"{name} has the number {cls.NUMBER}, which is that of {taken}"
        assert len(cls.WORDS) <= FIELDS - _OWN, (
            f"{name} has {len(cls.WORDS)} words; a line has {FIELDS - _OWN} of its own"
        )

    @classmethod
    def word(cls, name: str) -> int:
        """Where one of its own words is in a line."""
        return _OWN + cls.WORDS.index(name)

    def fill(self, lines: NDArray[np.int64], **own: Any) -> None:
        """Make lines [..., FIELDS] of queries that read all they see such of this record; own: its words, by name."""
        assert set(own) <= {word.lower() for word in self.WORDS}, (
            f"{type(self).__name__} has not all the words {set(own)}"
        )
        lines[..., KIND] = self.NUMBER
        for name, value in own.items():
            lines[..., self.word(name.upper())] = value

    @property
    def served_with(self) -> Hashable:
        """Queries of a step whose records have this alike are served by one call of one kernel."""
        return type(self)

    def beside(self, other: ReadRecord) -> ReadRecord:
        """The record for queries of both, which are served together."""
        assert other == self
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionRead(ReadRecord):
    """Reads all that it sees in its region. Every executor serves it, and steps do not name it."""

    NUMBER = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRead(ReadRecord):
    """Reads the sink, everything from `local` on, and of the blocks between the `kept` ones of the highest bounds.

    Blocks have `block` slots, which are positions; their bounds are in the region, from slot `bounds` on
    (`kernels/gather.py`). blocks: the most that a query selects from.
    """

    NUMBER = 1
    WORDS: ClassVar[tuple[str, ...]] = ("KEPT", "LOCAL", "BLOCK", "BOUNDS")
    KERNELS: ClassVar[Mapping[str, str]] = {
        "reference": "inference_engine.kernels.ragged_attention:attend_blocks",
        "by session": "inference_engine.kernels.ragged_attention:attend_blocks",
        "native": "src/blocks.h",
        "triton": "inference_engine.kernels.triton.gather:attend_selecting",
        "triton in one order": "inference_engine.kernels.triton.gather:attend_selecting_in_parts",
    }

    blocks: int

    @property
    def served_with(self) -> Hashable:
        return BlockRead

    def beside(self, other: ReadRecord) -> ReadRecord:
        assert isinstance(other, BlockRead)
        kind = max(self, other, key=lambda record: record.NUMBER)
        return replace(kind, blocks=max(self.blocks, other.blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadedBlockRead(BlockRead):
    """As `BlockRead`, where some blocks are not on the device: `places` is the address of numbers that say where
    (`kernels/offloaded.py`), and slots are a ring as `ring` has it.

    It sees all up to `upto`, whatever `count` is. Blocks before `offloaded_end` that are behind the sink are not in
    their slots. Where that number is negative, its absolute value is meant, and the query must not change which blocks
    are at hand. Kernels of it serve queries of `BlockRead`, too.
    """

    NUMBER = 2
    WORDS: ClassVar[tuple[str, ...]] = (*BlockRead.WORDS, "PLACES", "OFFLOADED_END")
    KERNELS: ClassVar[Mapping[str, str]] = {
        "reference": "inference_engine.kernels.ragged_attention:attend_blocks",
        "triton": "inference_engine.kernels.triton.gather:attend_selecting",
        "triton in one order": "inference_engine.kernels.triton.gather:attend_selecting_in_parts",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRead(ReadRecord):
    """Reads, of what it sees, the sink, everything from `local` on, and between them the `kept` tokens of largest
    weight (`kernels/components.py`).

    `index` is the number by which the executor knows the index of the layer's keys (`KVContext.open_index`); `shape`
    is the number of its shape. restored, numbers: the most tokens that one query has restored, and the most numbers of
    a token's code, padded, for which the executor needs room; 0: all are in its region.
    """

    NUMBER = 3
    WORDS: ClassVar[tuple[str, ...]] = ("KEPT", "LOCAL", "SHAPE", "INDEX")
    KERNELS: ClassVar[Mapping[str, str]] = {
        "native": "src/selection.h",
        "triton": "inference_engine.kernels.triton.components:attend_choosing",
        "triton in one order": "inference_engine.kernels.triton.components:attend_choosing",
    }

    shape: IndexShape
    restored: int = 0
    numbers: int = 0

    @property
    def served_with(self) -> Hashable:
        return TokenRead, self.shape

    def beside(self, other: ReadRecord) -> ReadRecord:
        assert isinstance(other, TokenRead)
        restored, numbers = max(self.restored, other.restored), max(self.numbers, other.numbers)
        return replace(self, restored=restored, numbers=numbers)


@dataclass(frozen=True, slots=True)
class StagedRead:
    """A record of a step. upto: the queries that read so are among the first so many of the step. tokens: no history of
    theirs is longer; few numbers, since kernels may be compiled for each.
    """

    record: ReadRecord
    upto: int
    tokens: int


class StagedReads:
    """The records of a step but plain ones, by what is served together."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[ReadRecord, int]] = {}

    def add(self, record: ReadRecord, end: int) -> None:
        """Queries before number `end` of the step read so."""
        kind = record.served_with
        known = self._found.get(kind)
        self._found[kind] = (record, end) if known is None else (known[0].beside(record), max(known[1], end))

    @property
    def records(self) -> tuple[ReadRecord, ...]:
        """Always in the same order."""
        if not self._found:
            return ()
        return tuple(sorted((record for record, _ in self._found.values()), key=_order))

    @property
    def upto(self) -> int:
        """Queries that read so are among the first so many of the step."""
        return max((end for _, end in self._found.values()), default=0)

    def staged(self, tokens: int) -> tuple[StagedRead, ...]:
        """tokens: as StagedRead has it."""
        return tuple(StagedRead(record, self._found[record.served_with][1], tokens) for record in self.records)


def _order(record: ReadRecord) -> tuple[int, str]:
    return record.NUMBER, repr(record)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Attention of single queries, each over what its line says.

    queries [N, Hq, Dk] · keys [R, Dk], values [R, Dv], vectors of the pool · lines [N, FIELDS]. Vectors lie as far
    apart in values as in keys. kv_heads: Hkv. reads: the records of the step but plain ones. has_chunks: are there
    neighbours of one session? Kernels may then read once what these share.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    lines: Tensor
    _: KW_ONLY
    kv_heads: int
    scaling: float
    softcap: float | None = None
    reads: Sequence[StagedRead] = ()
    has_chunks: bool = False

    def __post_init__(self) -> None:
        assert self.keys.stride() == self.values.stride() == (self.row, 1), "vectors lie differently"

    @property
    def row(self) -> int:
        """Numbers from one vector to the next."""
        return self.keys.stride(0)

    @property
    def head_dim(self) -> int:
        return self.queries.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[1] // self.kv_heads

    @property
    def cap(self) -> float:
        """For kernels; 0: none."""
        return 0.0 if self.softcap is None else self.softcap

    def ready(self) -> AttentionCall:
        """With queries and lines contiguous, as kernels take them."""
        if self.queries.is_contiguous() and self.lines.is_contiguous():
            return self
        return replace(self, queries=self.queries.contiguous(), lines=self.lines.contiguous())

    def of(self, some: slice) -> AttentionCall:
        """Of these queries alone."""
        return replace(self, queries=self.queries[some], lines=self.lines[some])

    def new_out(self) -> Tensor:
        """[N, Hq, Dv], not filled."""
        return self.queries.new_empty((*self.queries.shape[:2], self.values.shape[1]))


class ReadKernel(Protocol):
    """Fills `out` [N, Hq, Dv] for the queries that read as `read`. Queries, lines, out: contiguous.

    serves_all: also for all others, which read all they see. Otherwise theirs stays.
    """

    def __call__(self, call: AttentionCall, out: Tensor, read: StagedRead, *, serves_all: bool) -> None: ...


class RegionKernel(Protocol):
    """Fills `out` for the queries that read all they see in their regions, with zeros for the others."""

    def __call__(self, call: AttentionCall, out: Tensor) -> None: ...


class RaggedAttention(Protocol):
    """Attention of all queries of a step. An executor's is known by its `name`."""

    @property
    def name(self) -> str: ...

    def __call__(self, call: AttentionCall) -> Tensor:
        """[N, Hq, Dv] in the dtype of the queries. A query whose count is 0 gets zeros.

        Raises BackendError, naming it, for a record that is not supported.
        """

    def supports(self, record: ReadRecord) -> bool:
        """Does it serve queries that read so?"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionByRecord:
    """Implements RaggedAttention: plain reads by one kernel, and those of each record by the record's own.

    alone_upto: in a step of so many queries at most, none of which share what they read, the kernel of its only record
    serves all of them. is_even: must values be as large as keys? latent: where they are the first numbers of keys.
    """

    name: str
    regions: RegionKernel
    alone_upto: int = 0
    is_even: bool = False
    latent: RegionKernel | None = None

    def supports(self, record: ReadRecord) -> bool:
        return isinstance(record, RegionRead) or self.name in record.KERNELS

    def __call__(self, call: AttentionCall) -> Tensor:
        require_support(self, call.reads)
        call = call.ready()
        out = call.new_out()
        if self.latent is not None and call.kv_heads == 1 and call.values.shape[1] < call.head_dim and not call.reads:
            self.latent(call, out)
            return out
        if self.is_even and out.shape != call.queries.shape:
            raise BackendError(
                f"kernels of the executor {self.name!r} read values as large as keys, not values of {out.shape[2]} "
                f"numbers beside keys of {call.head_dim}; start with kernels=plain"
            )
        is_alone = len(call.reads) == 1 and len(call.queries) <= self.alone_upto and not call.has_chunks
        if not is_alone:
            self.regions(call, out)
        for read in call.reads:
            some = slice(None) if is_alone else slice(read.upto)
            _kernel(type(read.record), self.name)(call.of(some), out[some], read, serves_all=is_alone)
        return out


def require_support(attention: RaggedAttention, reads: Sequence[StagedRead]) -> None:
    """Raise BackendError, naming the record, unless the executor serves all of these."""
    for read in reads:
        if not attention.supports(read.record):
            raise BackendError(
                f"queries of this step read by {read.record}, which kernels of the executor {attention.name!r} do not "
                "serve; take another strategy, or start on a device that serves it"
            )


@cache
def _kernel(record: type[ReadRecord], executor: str) -> ReadKernel:
    module, name = record.KERNELS[executor].split(":")
    kernel: ReadKernel = getattr(import_module(module), name)
    return kernel
