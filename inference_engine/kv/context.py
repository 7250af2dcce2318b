"""What all sessions share: the pool of K/V, the device's operations, and optional parts beside the model."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.components import IndexShape, KeyComponents, ModelComponents
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kernels.trellis import Trellis
from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import Demand, Pool
from inference_engine.kv.memory.tier import NoTier, Tier
from inference_engine.kv.part import Held, Part
from inference_engine.kv.views import StagedQueries, StepReads

# Each piece is one operation in each layer of each step. A fork with more ancestors copies instead.
MOST_PIECES = 4

# rotate(keys [H, n, D], shifts [n], on the host, rotary name): the keys rotated to positions so much later (negative:
# earlier)
Rotate = Callable[[Tensor, Tensor, str], Tensor]

# A function of tensors that are all [n, ...] to others that are, index by index. Results are valid until the next call.
BatchFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]
# compute(name, function, tensors): function(tensors). Functions of the same name do the same to tensors whose shapes
# differ in n alone. They neither wait for the device nor look at values.
Compute = Callable[[Hashable, BatchFunction, Sequence[Tensor]], Sequence[Tensor]]


def compute_plainly(_name: Hashable, function: BatchFunction, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """A `Compute` that records nothing."""
    return function(tensors)


class Coder(Protocol):
    """Entries in regions become codes, and these become entries, in one operation: to the bit as a `KVCompressor` and
    `Rotate` have them; and codes of archived tokens become entries, as their `LayerDecoder` has them, up to rounding.

    By layer: `codes` [capacity, Hkv, bytes] in `code_slots` [n], entries in `slots` [n] of `regions` [Hkv, slots, D].
    Coded is an entry that is rotated by `shifts`, minus `means` [Hkv, D]; decoded is a code, plus `means`, that is then
    rotated by `shifts`. No shifts: it is not rotated; no means: none are added.
    """

    def codes(self, compressor: KVCompressor, head_dim: int) -> bool:
        """Is there an operation for this compressor?"""

    def decompress(self, compressor: KVCompressor, places: CodedPlaces) -> None: ...

    def compress(self, compressor: KVCompressor, places: CodedPlaces) -> bool:
        """False if an entry is not finite: then the codes mean nothing."""

    def restores(self, codes: ArchivedCodes, rotary: str) -> bool:
        """Is there an operation that restores entries of such codes?"""

    def restore(self, layers: Sequence[RestoredLayer], first: int, found: Tensor) -> None:
        """Write entries of consecutive positions, from `first` on, to where each of `layers` is read, keys rotated.

        found: float32 [layers, 2] on the device, becomes NaN where one of a layer's keys, or of its values, is not
        finite.
        """

    def analyses(self, rotary: str, head_dim: int, count: int) -> bool:
        """Is there an operation that makes a latent's numbers of so many such entries, faster than plain ones?"""

    def analyse(self, analyser: GroupAnalyser, layers: Sequence[ReadLayer], first: int) -> tuple[Tensor, Tensor]:
        """The numbers, float32 [n, C], of entries at consecutive positions, from `first` on, in a group's layers.

        And float32 [2, layers]: not finite where one of a layer's keys, or of its values, is not.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedPlaces:
    """See `Coder`."""

    codes: Sequence[Tensor]
    code_slots: Positions
    means: Sequence[Tensor]
    regions: Sequence[Tensor]
    slots: Positions
    shifts: Positions | None
    rotary: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldEntries:
    """Where entries of one layer may be restored already, and stay where there is room: the restore cache of an index.

    index: its number (`OpenIndex`). keys, values: the buffer's, [R, D].
    """

    index: int
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RestoredLayer:
    """What is restored, and where to: keys and values [Hkv, n, D] of the buffer's dtype; each head's are contiguous.

    held: what a device that has a restore cache need not restore.
    """

    codes: ArchivedCodes
    rotary: str
    keys: Tensor
    values: Tensor
    held: HeldEntries | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadLayer:
    """Entries of consecutive positions where attention reads them: keys, rotated, and values, [Hkv, n, D] each."""

    rotary: str
    keys: Tensor
    values: Tensor


class NoCoder:
    """For a device without such operations."""

    def codes(self, compressor: KVCompressor, head_dim: int) -> bool:
        return False

    def decompress(self, *_: object) -> None:
        raise AssertionError("it has no operation")

    def compress(self, *_: object) -> bool:
        raise AssertionError("it has no operation")

    def restores(self, *_: object) -> bool:
        return False

    def restore(self, *_: object) -> None:
        raise AssertionError("it has no operation")

    def analyses(self, *_: object) -> bool:
        return False

    def analyse(self, *_: object) -> tuple[Tensor, Tensor]:
        raise AssertionError("it has no operation")


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class LayerDecoder:
    """How the code of a token becomes the entries of one layer, as plain numbers:

        entries = means + matrix · (scale · level of each code)          K, unrotated, then V

    The bytes from `first_byte` on belong to the layer's group: a scale, then codes of `widths` bits, the most
    significant bit first. The level of code c is `levels[tables[c] + 4 · (c // 2) + subset]`, where the subset follows
    from the lowest bits of this code and of those `chains`, 2 · `chains` and 3 · `chains` before
    (`kernels/trellis.py`).

    scales [256] float32, by the first byte. widths, tables [C] int32; levels float32. means [Hkv, 2 · D] float32.
    make_matrix: makes the matrix, [Hkv, 2 · D, C] float32.
    """

    first_byte: int
    chains: int
    scales: Tensor
    widths: Tensor
    tables: Tensor
    levels: Tensor
    means: Tensor
    make_matrix: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class GroupAnalyser:
    """How entries of a group of layers become the numbers that are coded for it:

        numbers [C] = sum over layers, heads, keys and values of (entries − means) · matrix         K unrotated

    By layer of `layers`: means [Hkv, 2 · D] float32, K and V; make_matrix(index) makes the matrix of layer number
    `index`, [Hkv, 2 · D, C] float32. count: C.
    """

    layers: tuple[int, ...]
    count: int
    means: tuple[Tensor, ...]
    make_matrix: Callable[[int], Tensor]


class TokenDecoder(Protocol):
    """What codes of tokens become: entries of many layers, keys unrotated. Calibrated for one model.

    Coding neither waits for the device nor looks at values: callers check whether they are finite.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose entries a code becomes, ascending."""

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def least_bytes_per_token(self) -> int:
        """The smallest size that `at` accepts."""

    def using(self, trellis: Trellis) -> Self:
        """The same codec, if its codes are chosen along a trellis by a device's own operations."""

    def has(self, bytes_per_token: int) -> bool:
        """Would `at` return at once?"""

    def at(self, bytes_per_token: int) -> TokenDecoder:
        """The same codec with fewer bytes per token. The first time it may read tensors, and takes longer than a step.

        Raises ModelError for a codec on disk that is damaged.
        """

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """K and V, float32 [n, Hkv, D], of each layer asked for (None: all), in that order."""

    def decoder(self, layer: int) -> LayerDecoder | None:
        """What `decode` does for one layer, as numbers; the same object for the same layer. None if it is no such
        function."""


class TokenCodec(TokenDecoder, Protocol):
    """A code of entries: that of a position depends on its entries alone, up to rounding."""

    def at(self, bytes_per_token: int) -> TokenCodec: ...

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """K and V of each of `layers`, [n, Hkv, D] in any float dtype -> uint8 [n, bytes_per_token]."""

    def analysers(self) -> Sequence[GroupAnalyser] | None:
        """The first half of `encode`, as numbers: for each group; the same objects each time. None if it has none."""

    def encode_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        """The second half: of each group's numbers, float32 [n, C], uint8 [n, bytes_per_token]."""


class TapCodec(TokenDecoder, Protocol):
    """A code of what a drafter reads of a token: the model's hidden states after the drafter's tap layers.

    f_theta maps them to the entries: a code is made when the token is computed, for taps are kept by nothing else.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The model's layers whose outputs it reads, ascending."""

    @property
    def digest(self) -> str:
        """SHA-256 of its tensors: with another one, sessions would have other tokens."""

    def at(self, bytes_per_token: int) -> TapCodec: ...

    def encode_taps(self, taps: Tensor) -> Tensor:
        """[n, taps, hidden] in any float dtype -> uint8 [n, bytes_per_token]."""


class WholeTokens:
    """What a `TokenCodec` of one size and no parts by layer has beside `layers`, sizes, `encode` and `decode`."""

    def using(self, trellis: Trellis) -> Self:
        return self

    def has(self, bytes_per_token: int) -> bool:
        return True

    def at(self, bytes_per_token: int) -> Self:
        return self

    def analysers(self) -> None:
        return None

    def encode_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        raise AssertionError("it has no analysers")

    def decoder(self, layer: int) -> None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArchivedCodes:
    """Codes of one session's archived tokens, and how they become entries of one layer.

    halves: [places, half of the bytes] uint8 each; place i is that of position `first` + i.
    """

    halves: tuple[Tensor, Tensor]
    first: int
    decoder: LayerDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreCache:
    """Room for restored entries of a layer: `slots` for each KV head, from buffer vector `start` on.

    each: slots for each KV head of a further room, of which there may be `most_rooms`.
    """

    start: int
    slots: int
    each: int = 0
    most_rooms: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerIndex:
    """The index of one layer's keys in one session.

    halves: even tiles and odd ones, [pairs of tiles, Hkv, tile_bytes] uint8 each (`kv/parts/component_index.py`).
    capacity: of the layer's regions, in tokens.
    """

    layer: int
    rotary: str
    shape: IndexShape
    components: KeyComponents
    halves: tuple[Tensor, ...]
    capacity: int


class OpenIndex(Protocol):
    """What a device's operation keeps of a `LayerIndex`, for as long as plan lines may name it."""

    @property
    def number(self) -> int:
        """The word INDEX of plan lines (`kernels/reads.py`); never 0."""

    def restore_from(self, codes: ArchivedCodes | None, cache: RestoreCache | None, found: Tensor) -> bool:
        """From now on restore chosen tokens that have left the regions, into `cache`. False if the device cannot.

        cache: None without `Geometry.holds_restored`. found: float32 [2] on the device, zeros. Where `says_found`, it
        becomes not finite once a key, or a value, is restored that is not.
        """

    def forget_restored(self) -> None:
        """What the restore cache holds is about to be overwritten."""

    def add_restored(self, start: int) -> None:
        """A further room of the restore cache begins at buffer vector `start`. Between steps."""

    def keep_restored(self, rooms: int) -> None:
        """Any thread: further rooms but for the first so many are about to be given back. What an operation that runs
        has restored there stays until it is over.
        """

    def restore_no_more(self) -> None:
        """The restore cache is about to be given back."""

    @property
    def restored_numbers(self) -> int:
        """Of how many numbers it makes a token, if the operation needs room for them (`TokenRead`); else 0."""

    @property
    def restored_all_finite(self) -> bool:
        """Have all entries been finite that it restored into this cache? True where `says_found`."""

    @property
    def says_found(self) -> bool:
        """Is it the device that says so?"""


class TileWriter(Protocol):
    """Writes tiles of the indexes of some layers of one session, from keys in their regions."""

    def __call__(self, keys: Tensor, first: int, end: int) -> None:
        """The tiles [first, end). keys: the buffer [R, D]. Does not wait for the device."""


OpenLayerIndex = Callable[[LayerIndex], OpenIndex | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledLayers:
    """Indexes of alike layers of one session, and where their keys are.

    numbers: of the indexes. starts: the first buffer vector of each layer's regions, which have `region` vectors for
    each KV head. Keys are in slots that are their positions; behind the sink in a ring buffer of `ring` slots, if > 0.
    """

    numbers: Sequence[int]
    starts: Sequence[int]
    kv_heads: int
    region: int
    shape: IndexShape
    sink: int = 0
    ring: int = 0


OpenTiles = Callable[[TiledLayers], TileWriter | None]


def open_no_index(_index: LayerIndex) -> None:
    """For a device whose operation over regions knows no index of keys: queries that choose tokens read by views."""


def open_no_tiles(*_: object) -> None:
    """For a device without an operation that writes tiles: plain operations do."""


class DraftMemory(Part):
    """A drafter's memory of one session, reserved for the session's life. It is not copied: forks begin empty, and so
    does a session that goes back."""

    @abstractmethod
    def clear(self) -> None:
        """Go back to an empty history."""

    def read(self, queries: StagedQueries, step: StepReads) -> int:
        return sys.maxsize

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        """A step stages nothing here."""
        return sys.maxsize

    def can_rewind(self, at: int, length: int) -> bool:
        return True

    def forget(self, at: int, length: int) -> None:
        self.clear()

    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes in use, at most those demanded."""

    def report(self, held: Held, length: int, end: int) -> None:
        held.add(draft=self.held_bytes())


class DraftMemories(Protocol):
    """Opens the draft memories of sessions. They lie in the pool, and count in a session's bound and footprint."""

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        """The memory that one session needs in the pool; () if the drafter keeps none."""

    def open(self, context: KVContext) -> DraftMemory | None:
        """Reserve one session's memory; None, and nothing taken, if the pool has no room.

        Not called if nothing is demanded.
        """


class NoDraftMemories:
    """For an engine without a drafter, or with one that keeps no memory of sessions."""

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return ()

    def open(self, context: KVContext) -> DraftMemory | None:
        raise AssertionError("nothing is demanded")


# settle(states [bytes], held, kept, staged), between two steps: the layers of a session have `held` open entries and
# `staged` ones behind them, of which the first `kept` stay. Whole chunks are folded into the state, and what does not
# stay is wiped (`kv/parts/open_chunk.py`).
Settle = Callable[[Tensor, int, int, int], None]


def settle_nothing(*_: object) -> None:
    """For a device whose states have no open chunk."""
    raise AssertionError("its states have no open chunk")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVContext:
    """What sessions share: the model's geometry, the pool, the model's rotation.

    ops: the device's array operations.
    compute: runs a function again and again on batches of any size; the device may record it. coder: codes
    entries that are in regions where `compute` need not.
    most_tokens_at_once: tokens of the longest step that is fastest in one piece, if its queries all read regions.
    Longer steps are faster in pieces, but for those of `busy_tokens` or more, which keep the device busy while the host
    launches them. None: there is no such length. most_positions_in_pieces: behind a longer history, attention outweighs
    all else in a step, and steps beyond recording have the faster one. most_pieces: of a shared prefix, in the
    memory of as many sessions; queries read one by numbers. open_index: makes an index of keys known to the operation
    over regions. open_tiles: what writes its tiles. settle: folds open chunks of recurrent states. latent, f_theta,
    components, draft_memories, tier: a latent codec, one of the drafter's taps, components of keys by layer, memory for
    a drafter, and a second tier for entries, if there are any. why_no_f_theta: and what to do about it.
    """

    geometry: Geometry
    pool: Pool
    rotate: Rotate
    device: torch.device
    ops: DeviceOps = REFERENCE
    compute: Compute = compute_plainly
    coder: Coder = field(default_factory=NoCoder)
    most_tokens_at_once: int | None = None
    busy_tokens: int | None = None
    most_positions_in_pieces: int = 4096
    most_pieces: int = MOST_PIECES
    open_index: OpenLayerIndex = open_no_index
    open_tiles: OpenTiles = open_no_tiles
    settle: Settle = settle_nothing
    latent: TokenCodec | None = None
    f_theta: TapCodec | None = None
    why_no_f_theta: str = ""
    components: ModelComponents = field(default_factory=dict)
    draft_memories: DraftMemories = field(default_factory=NoDraftMemories)
    tier: Tier = field(default_factory=NoTier)

    def of(self, geometry: Geometry) -> KVContext:
        """The same for sessions of this geometry."""
        return self if geometry == self.geometry else replace(self, geometry=geometry)
