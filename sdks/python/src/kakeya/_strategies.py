"""KV strategies as frozen values: what a session keeps in memory, chosen when it is created.

A strategy with an arm of its own on the wire has a class here, named in `_KINDS`; its fields are named like the arm's.
`Named` is any strategy that the server has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kakeya._checks import finite, invalid, whole_number
from kakeya.v1 import runtime_pb2 as pb

_UINT32 = 2**32


class Strategy(ABC):
    """Base of the strategies. None in place of one means the server's default."""

    _arm: ClassVar[str]

    @abstractmethod
    def __post_init__(self) -> None:
        """Check what protobuf would take wrongly. Raises InvalidArgument."""

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in _arm_fields(self._arm)}
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None and value != ())
        return f"{type(self).__name__}({shown})"

    def __str__(self) -> str:
        """As the server's `--strategy` takes it, such as "sink_window:window=64"."""
        given = {name: getattr(self, name) for name in _arm_fields(self._arm)}
        return _text(
            self._arm,
            {name: _option_text(value, name) for name, value in given.items() if value is not None and value != ()},
        )

    def _to_wire(self) -> pb.Strategy:
        """The strategy as a protobuf message. What is None stays absent."""
        options: dict[str, Any] = {name: getattr(self, name) for name in _arm_fields(self._arm)}
        arms: dict[str, Any] = {self._arm: options}
        return pb.Strategy(**arms)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Full(Strategy):
    """All KV entries are kept. The session ends at the model's trained positions.

    codec: the name of a compressor, such as "int8", for the KV entries before the last `exact_window` positions, except
    in `exact_layers`. None: no compression. For a number, None leaves it to the server.
    """

    _arm: ClassVar[str] = "full"

    codec: str | None = None
    exact_window: int | None = None
    exact_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_coding(self.codec, self.exact_window, self.exact_layers)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SinkWindow(Strategy):
    """Keeps the first `sink` and at least the last `window` KV entries; the rest are evicted and never read again.

    None leaves a number to the server; a session's `strategy` has the numbers in force. The codec is as in `Full`.
    """

    _arm: ClassVar[str] = "sink_window"

    sink: int | None = None
    window: int | None = None
    codec: str | None = None
    exact_window: int | None = None
    exact_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_window(self.sink, self.window)
        _check_coding(self.codec, self.exact_window, self.exact_layers)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LayerWindow(Strategy):
    """All KV entries in `full_layers`, numbered from 0; sink and window in the others, as in `SinkWindow`.

    Which layers retrieve distant tokens varies by model. Layers with a sliding window of their own are not affected
    and cannot be named. The session ends at the model's trained positions.
    """

    _arm: ClassVar[str] = "layer_window"

    full_layers: tuple[int, ...]
    sink: int | None = None
    window: int | None = None
    codec: str | None = None
    exact_window: int | None = None
    exact_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_layers(self.full_layers, "full_layers")
        _check_window(self.sink, self.window)
        _check_coding(self.codec, self.exact_window, self.exact_layers)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Restored(Strategy):
    """Keeps the KV entries of `SinkWindow`; each Generate restores the others and reads every position.

    source: "recompute" computes them again from the token ids, "latent" decodes `bytes_per_token` stored for each, if
    the server supports it, "drafter" as many of what the server's drafter read of each. mode: "hold" restores once
    and holds all of them during the Generate, "stream" decodes a chunk at a time, for each token again, "select" only
    those that a generated token chooses, as `Gather` does. budget, rank, bits, run: of "select", as for `Gather`;
    awake_bytes: decoded entries that it holds during the Generate; appended: "all" lets appended tokens read
    everything, "select" lets each choose, too. resident_latent_bytes: how much of the stored codes stays on the
    device. None leaves an option to the server. The session ends at the model's trained positions.
    """

    _arm: ClassVar[str] = "restored"

    sink: int | None = None
    window: int | None = None
    source: str | None = None
    bytes_per_token: int | None = None
    mode: str | None = None
    resident_latent_bytes: int | None = None
    budget: int | None = None
    rank: int | None = None
    bits: int | None = None
    run: int | None = None
    awake_bytes: int | None = None
    appended: str | None = None

    def __post_init__(self) -> None:
        _check_window(self.sink, self.window)
        _check_name(self.source, "source")
        _check_name(self.appended, "appended")
        for name in ("bytes_per_token", "budget", "rank", "bits", "run"):
            _check_number(getattr(self, name), name, at_least=1)
        _check_name(self.mode, "mode")
        for name, least in (("resident_latent_bytes", 0), ("awake_bytes", 1)):
            if (asked := getattr(self, name)) is not None:
                whole_number(asked, name, at_least=least, below=2**63)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Gather(Strategy):
    """Keeps all KV entries; a generated token reads `budget` of them: sink, window, the best-scoring tokens or blocks.

    Appended tokens read all entries. scorer: "components" selects tokens by an index of their keys, "bounds" selects
    blocks. block: positions of a block. rank, bits, run: of the index: components of a key, bits of each,
    positions that share a rotation. None leaves an option to the server. The session ends at the model's trained
    positions.
    """

    _arm: ClassVar[str] = "gather"

    budget: int | None = None
    block: int | None = None
    sink: int | None = None
    window: int | None = None
    scorer: str | None = None
    rank: int | None = None
    bits: int | None = None
    run: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "block", "rank", "bits", "run"):
            _check_number(getattr(self, name), name, at_least=1)
        _check_window(self.sink, self.window)
        _check_name(self.scorer, "scorer")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Tiered(Strategy):
    """Keeps all KV entries: the last `resident_tokens` and the sink on the device, the others in the second tier.

    Tokens read as with `Gather`; what a generated one needs of the others is fetched. None leaves an option to the
    server. The session ends at the model's trained positions.
    """

    _arm: ClassVar[str] = "tiered"

    budget: int | None = None
    block: int | None = None
    sink: int | None = None
    window: int | None = None
    resident_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_number(self.budget, "budget", at_least=1)
        _check_number(self.block, "block", at_least=1)
        _check_window(self.sink, self.window)
        _check_number(self.resident_tokens, "resident_tokens", at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Mac(Strategy):
    """Keeps all KV entries; a generated token reuses the attention of a similar query, and reads newer ones.

    Appended tokens read all entries. ring: size of the query cache, in positions. band: entries before the matched one
    that are read again. threshold: the largest distance of a match, as a share of the distance of unlike queries; 0: no
    reuse. chain_limit: links back to a token that read all entries, -1 for any number. None leaves an option to the
    server. The session ends at the model's trained positions. A server has it if the package kakeya-mac is installed.
    """

    _arm: ClassVar[str] = "mac"

    ring: int | None = None
    band: int | None = None
    threshold: float | None = None
    chain_limit: int | None = None

    def __post_init__(self) -> None:
        _check_number(self.ring, "ring", at_least=1)
        _check_number(self.band, "band", at_least=0)
        if self.threshold is not None and finite(self.threshold, "threshold") < 0:
            raise invalid("threshold", f"must be at least 0, got {self.threshold!r}")
        if self.chain_limit is not None:
            whole_number(self.chain_limit, "chain_limit", at_least=-1, below=2**31)


@dataclass(frozen=True, init=False, slots=True, repr=False)
class Named(Strategy):
    """Any strategy of the server's, by its name; `server_info().strategies` lists them.

    Options are those of the server's `--strategy`: `Named("tova", budget=128)`. Each is a number, a name or whole
    numbers, kept as the text that the server reads; None leaves it to the server. A name or an option that the server
    does not have is InvalidArgument, which lists those that it has. A session's `strategy` is `Named` if the strategy
    has no class of its own here.
    """

    _arm: ClassVar[str] = "named"

    name: str
    _pairs: tuple[tuple[str, str], ...]

    def __init__(self, name: str, /, **options: float | str | Iterable[int] | None) -> None:
        pairs = [(option, _option_text(value, option)) for option, value in options.items() if value is not None]
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_pairs", tuple(sorted(pairs)))
        self.__post_init__()

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise invalid("name", f"must be the name of a strategy, got {self.name!r}")

    @property
    def options(self) -> dict[str, str]:
        """The options as text, by name."""
        return dict(self._pairs)

    def __repr__(self) -> str:
        return f"Named({', '.join([repr(self.name), *(f'{option}={text!r}' for option, text in self._pairs)])})"

    def __str__(self) -> str:
        return _text(self.name, self.options)

    def _to_wire(self) -> pb.Strategy:
        return pb.Strategy(named=pb.NamedStrategy(name=self.name, options=self.options))


_KINDS: dict[str, type[Strategy]] = {
    kind._arm: kind for kind in (Full, SinkWindow, LayerWindow, Restored, Gather, Tiered, Mac)
}


def from_wire(message: pb.Strategy) -> Strategy | None:
    """The strategy of a reply; None if it is of a kind newer than this SDK."""
    name = message.WhichOneof("kind")
    if name == Named._arm:
        texts: dict[str, Any] = dict(message.named.options)
        return Named(message.named.name, **texts)
    if name is None or name not in _KINDS:
        return None
    arm = getattr(message, name)
    options: dict[str, Any] = {}
    for option, is_repeated in _arm_fields(name).items():
        if is_repeated:
            options[option] = tuple(getattr(arm, option))
        elif arm.HasField(option):
            options[option] = getattr(arm, option)
    return _KINDS[name](**options)


def _text(name: str, options: Mapping[str, str]) -> str:
    shown = ",".join(f"{option}={text}" for option, text in options.items())
    return f"{name}:{shown}" if shown else name


def _option_text(value: object, option: str) -> str:
    """`value` as the server reads it."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(finite(value, option)) if isinstance(value, float) else str(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        numbers = list(value)
        if numbers:
            return "+".join(str(whole_number(each, f"{option}[{n}]", below=2**63)) for n, each in enumerate(numbers))
    raise invalid(option, f"must be a number, a name, whole numbers or None, got {value!r}")


def _arm_fields(arm: str) -> dict[str, bool]:
    """The fields of an arm by name: is it a list?"""
    descriptor = getattr(pb.Strategy(), arm).DESCRIPTOR
    return {field.name: field.is_repeated for field in descriptor.fields}


def _check_window(sink: int | None, window: int | None) -> None:
    _check_number(sink, "sink", at_least=0)
    _check_number(window, "window", at_least=1)


def _check_coding(codec: str | None, exact_window: int | None, exact_layers: tuple[int, ...]) -> None:
    _check_name(codec, "codec")
    _check_number(exact_window, "exact_window", at_least=1)
    _check_layers(exact_layers, "exact_layers")


def _check_number(value: int | None, field: str, *, at_least: int) -> None:
    if value is not None:
        whole_number(value, field, at_least=at_least, below=_UINT32)


def _check_name(value: str | None, field: str) -> None:
    if not (value is None or (isinstance(value, str) and value)):
        raise invalid(field, f"must be a name or None, got {value!r}")


def _check_layers(layers: tuple[int, ...], field: str) -> None:
    # A list would not compare equal to a session's `strategy`, and could change later.
    if not isinstance(layers, tuple):
        raise invalid(field, f"must be a tuple of layer numbers, got {layers!r}")
    for index, layer in enumerate(layers):
        whole_number(layer, f"{field}[{index}]", below=_UINT32)
