"""The shape of a model's KV cache: K and V of each layer (MHA, GQA, MQA), and the units of memory.

Layers of the model are not layers of the cache. Queries of several layers may read the entries of one, which are then
stored once and counted once; a layer without attention keeps no entries. Everything in `kv` numbers stored layers;
options of strategies, taps of drafters and messages number the model's.

    layer of the model     0  1  2  3  4  5  6  7
    Geometry.reads         0  1  2  3  2  2  2  3      layers 4 to 7 read what 2 and 3 keep: four stored layers
    of a hybrid model      –  –  –  0  –  –  –  1      two stored layers; the others keep a state, in Geometry.states
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from inference_engine.errors import ConfigError

# Entries outside the regions are read in chunks: few operations for many entries, and little memory at once.
SEGMENTS_IN_A_CHUNK = 4
# The table of a model that has one for all layers; and, of a model that has another for short histories, that one.
ONE_ROTARY = "default"
SHORT_ROTARY = "short"
# In the place of a rotation table's name: the layer's keys do not depend on the position …
UNROTATED = "unrotated"
# … or they do, but cannot be moved to another position, for example because they are normed after rotation.
IMMOVABLE = "immovable"


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """The result of testing a layer.

    rotary: the table that rotates its keys, UNROTATED (so is a layer without keys) or IMMOVABLE. is_windowed: does it
    have a sliding window? reads: the earlier layer of the model whose entries its queries read; None: its own.
    """

    rotary: str
    is_windowed: bool
    reads: int | None = None


@dataclass(frozen=True, slots=True)
class EntryShape:
    """An entry of one KV head in memory: one vector of its key and its value, which may share numbers.

        shared 0             | key | value |
        as many as a value   | value = the key's first numbers | the key's others |           latent attention
        fewer                | the value's first | shared | the key's last |               values made of keys (Gemma 4)

    shared: how many numbers are the last of the value and the first of the key.
    """

    key: int
    value: int
    shared: int = 0
    # Worked out once. width: numbers of an entry. key_at, value_at: where in it each begins.
    width: int = field(init=False, repr=False, compare=False)
    key_at: int = field(init=False, repr=False, compare=False)
    value_at: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 <= self.shared <= min(self.key, self.value), self
        object.__setattr__(self, "key_at", self.value - self.shared if self.shared else 0)
        object.__setattr__(self, "value_at", 0 if self.shared else self.key)
        object.__setattr__(self, "width", self.key + self.value - self.shared)

    @property
    def is_even(self) -> bool:
        """Are key and value of one size, side by side?"""
        return self.has_one_size and not self.shared

    @property
    def has_one_size(self) -> bool:
        return self.key == self.value

    @property
    def value_in_key(self) -> bool:
        """Does all of the value lie in the key?"""
        return self.shared == self.value

    def split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., D] of vectors [..., width]: views."""
        at, value_at = self.key_at, self.value_at
        return vectors[..., at : at + self.key], vectors[..., value_at : value_at + self.value]

    def join(self, keys: Tensor, values: Tensor) -> Tensor:
        """The inverse of `split`: a copy."""
        return torch.cat((values, keys[..., self.shared :]) if self.shared else (keys, values), dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGeometry:
    """What an attention layer keeps of a token: K and V. Nothing assumes that layers are alike.

    head_dim, value_dim: numbers of a key, and of a value if they are not as many. shared_dim: how many of them are
    stored once, for both (`EntryShape`).
    native_window: entries that a query sees by the model's design, its own included; None means all.
    rotary: which of the model's rotation tables turns the layer's keys, or UNROTATED or IMMOVABLE.
    is_indexed: does the model choose which entries each of its queries reads?
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0  # 0: as head_dim
    shared_dim: int = 0
    native_window: int | None = None
    rotary: str = ONE_ROTARY
    is_indexed: bool = False
    entry: EntryShape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)
        object.__setattr__(self, "entry", EntryShape(self.head_dim, self.value_dim, self.shared_dim))

    def entry_bytes(self, itemsize: int) -> int:
        """Bytes of one entry: K and V of one position in this layer."""
        return self.kv_heads * self.entry.width * itemsize


@dataclass(frozen=True, slots=True)
class ReadsLayer:
    """Of a layer that keeps nothing: its queries read the entries of this layer of the model, an earlier one."""

    layer: int


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state. dtype: as torch names it."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """Of a state that is one after whole chunks of `tokens`, counted from position 0: it has `room` for entries of the
    tokens since, so that it can go back to each of these. is_numbered: kernels find it by the numbers of a step."""

    tokens: int
    room: int
    is_numbered: bool = False

    def begin(self, position: int) -> int:
        """Where the open chunk begins after so many tokens."""
        return position - position % self.tokens


@dataclass(frozen=True, slots=True)
class Recurrent:
    """What a layer keeps of the whole history, however long: the state of linear attention or of a state space model,
    the last inputs of a convolution. `kv/parts/recurrent.py` holds it.

    chunk: None for a state that is one after the last token, and of no other.
    """

    tensors: tuple[StateTensor, ...]
    chunk: OpenChunk | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Beside:
    """Of a layer with attention and a recurrent state side by side (Falcon-H1)."""

    attention: LayerGeometry | ReadsLayer
    state: Recurrent


@dataclass(frozen=True, slots=True)
class KeepsNothing:
    """Of a layer that sees each token alone, such as a feed-forward block that counts as a layer (Nemotron-H)."""


# What a layer of the model keeps, or whose entries it reads.
LayerSpec = LayerGeometry | ReadsLayer | Recurrent | Beside | KeepsNothing


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLayers:
    """layers: those that keep entries. By layer of the model, reads: the index of the one whose entries its queries
    read, None without attention; states: its recurrent state; () if no layer has one."""

    layers: tuple[LayerGeometry, ...]
    reads: tuple[int | None, ...]
    states: tuple[Recurrent | None, ...]

    @staticmethod
    def of(specs: Sequence[LayerSpec]) -> StoredLayers:
        layers: list[LayerGeometry] = []
        reads: list[int | None] = []
        states: list[Recurrent | None] = []
        for spec in specs:
            attention = spec.attention if isinstance(spec, Beside) else spec
            if isinstance(attention, ReadsLayer):
                reads.append(reads[attention.layer])
            elif isinstance(attention, LayerGeometry):
                reads.append(len(layers))
                layers.append(attention)
            else:
                reads.append(None)
            states.append(spec.state if isinstance(spec, Beside) else spec if isinstance(spec, Recurrent) else None)
        return StoredLayers(layers=tuple(layers), reads=tuple(reads), states=tuple(states) if any(states) else ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What a model's layers keep, and the sizes everything is rounded to.

    layers: those that keep entries. reads: by layer of the model, the one whose entries its queries read; None: none.
    By default each layer reads its own. states: by layer of the model, its recurrent state; () if no layer has one.
    page_tokens: unit of allocation. segment_tokens: positions that are prefilled and evicted together.
    token_quantum, key_quantum: what tokens and keys of a forward are padded to; 1 means no padding.
    opening_tokens: slots that are opened together. Padded keys are read (and masked), so they are opened with the
    entries they pad.
    by_heads: the layers by their number of KV heads.
    numbers_states: do kernels find recurrent states by the numbers of a step?
    segments_at_once: of appended tokens, in a step of layers whose entries are offloaded or restored. Such a step reads
    all of these entries, so a fast device is better off with a few long ones, for which these layers have room. Layers
    that see no more than a window of the model's have room for as many, too, up to that window.
    segments_in_a_chunk: of restored entries that are read together. Few large chunks keep a fast device busy.
    joins_segments: may appended tokens of two segments share a step, where they read old entries chunk by chunk? These
    are then restored once for both (`kv/parts/streamed.py`).
    holds_restored: do chosen entries stay restored between steps? Not on a device that restores a choice in each.
    is_split: have several devices a part of the KV heads each? Then queries read by plan numbers, or causal views.
    short_positions: a session of at most so many positions rotates by a table of its own, SHORT_ROTARY in place of
    ONE_ROTARY (LongRoPE, Ding et al. 2024, section 3.3); None: one table serves all. Rotated keys of the two cannot be
    read together, so a session's limit chooses, not its length. is_endless: can positions lie past the trained ones?
    """

    layers: tuple[LayerGeometry, ...]
    reads: tuple[int | None, ...] = ()
    states: tuple[Recurrent | None, ...] = ()
    itemsize: int
    trained_positions: int
    short_positions: int | None = None
    is_endless: bool = True
    page_tokens: int = 16
    segment_tokens: int = 256
    token_quantum: int = 1
    key_quantum: int = 1
    segments_at_once: int = 1
    segments_in_a_chunk: int = SEGMENTS_IN_A_CHUNK
    joins_segments: bool = False
    holds_restored: bool = True
    is_split: bool = False
    # Worked out once: every step asks for them. alignment: elements that allocations are multiples of; any vector, and
    # a word of 32 bytes, can begin there.
    alignment: int = field(init=False, repr=False, compare=False)
    opening_tokens: int = field(init=False, repr=False, compare=False)
    by_heads: Mapping[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    numbers_states: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.segment_tokens % self.token_quantum:
            raise ConfigError(
                f"segment_tokens ({self.segment_tokens}) must be a multiple of the token quantum ({self.token_quantum})"
            )
        if not self.reads:
            object.__setattr__(self, "reads", tuple(range(len(self.layers))))
        assert {read for read in self.reads if read is not None} == set(range(len(self.layers))), "each is read"
        by_heads: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            by_heads.setdefault(layer.kv_heads, []).append(index)
        object.__setattr__(self, "by_heads", {heads: tuple(layers) for heads, layers in by_heads.items()})
        object.__setattr__(self, "alignment", math.lcm(16, *(layer.entry.width for layer in self.layers)))
        object.__setattr__(self, "numbers_states", self.open_chunk is not None and self.open_chunk.is_numbered)
        object.__setattr__(self, "opening_tokens", math.lcm(self.page_tokens, self.key_quantum))

    def read_by(self, numbers: Collection[int]) -> frozenset[int]:
        """The stored layers whose entries these layers of the model read."""
        return frozenset(read for read in (self.reads[number] for number in numbers) if read is not None)

    def within(self, limit_tokens: int | None) -> Geometry:
        """Of sessions with this limit: their layers name the table that they rotate by."""
        if self.short_positions is None or limit_tokens is None or limit_tokens > self.short_positions:
            return self
        return replace(
            self,
            layers=tuple(
                replace(layer, rotary=SHORT_ROTARY) if layer.rotary == ONE_ROTARY else layer for layer in self.layers
            ),
        )

    def rotates_as(self, other: Geometry) -> bool:
        """Can sessions of the one read keys that those of the other have rotated?"""
        return all(own.rotary == theirs.rotary for own, theirs in zip(self.layers, other.layers, strict=True))

    def in_long_segments(self) -> Geometry:
        """The same with segments as long as `segments_at_once` of them."""
        if self.segments_at_once == 1:
            return self
        return replace(self, segment_tokens=self.segment_tokens * self.segments_at_once, segments_at_once=1)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one position in all layers."""
        return sum(layer.entry_bytes(self.itemsize) for layer in self.layers)

    @property
    def state_layers(self) -> dict[int, Recurrent]:
        """The recurrent states of the layers of the model that have one, by their numbers."""
        return {number: state for number, state in enumerate(self.states) if state is not None}

    @property
    def open_chunk(self) -> OpenChunk | None:
        """Of the recurrent states, which are all of one kind."""
        return next((state.chunk for state in self.states if state is not None), None)

    def round_up(self, entries: int) -> int:
        """Slots that `entries` take, rounded up to what is opened together."""
        return -(-entries // self.opening_tokens) * self.opening_tokens
