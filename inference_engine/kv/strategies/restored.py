"""Restored strategy: sink and window stay exact, older entries are archived and restored.

    idle     ■ ■ ■ ■ |               | ■ ■ ■ ■ ■      sink and window, and the archive of the rest
    hold     ■ ■ ■ ■ | □ □ □ □ □ □ □ | ■ ■ ■ ■ ■      the rest restored, during a Generate
    stream   ■ ■ ■ ■ |     | □ □ |   | ■ ■ ■ ■ ■      a chunk of the rest at a time, in every layer of every step
    select   ■ ■ ■ ■ |   □ |   | □ □ | ■ ■ ■ ■ ■      tokens of choice, most of them still there from the step before

Source `latent` keeps one code of `bytes_per_token` bytes per archived position, across all layers, and restores entries
approximately. Source `recompute` keeps nothing: old entries are recomputed from the token ids. It is exact, equal to
`full` up to rounding, holds the bytes of `sink_window` between Generates, and costs a prefill of the whole history at
each Generate.

Source `drafter` keeps as many bytes of what the server's trained drafter reads of a position, its taps of the model's
hidden states, and f_theta maps them to the entries of all layers. They are coded when their token is computed, so that
the exact window has codes, too.

Mode `hold` restores once and holds all entries while it generates. `stream` holds only a chunk of one layer, and
decodes every archived position again in each step. It needs a source that is local in position: not `recompute`.
`resident_latent_bytes` limits the latents on the device: older ones lie in the second tier, and are read from there
when they are restored.

Mode `select` restores only what a generated token reads: besides sink and window the tokens of largest weight, which
each KV head of each layer chooses for itself by an index of leading components of keys (`kernels/components.py`), as
`gather` does. `budget` counts the entries that it reads. `awake_bytes` of restored entries are held while the session
is active; those that were not chosen for longest make room. Appended tokens read everything, as in `stream`, or, with
`appended=select`, each chooses as a generated one does. It needs components of the model's keys beside the latent
codec. ShadowKV (Sun et al., arXiv 2410.21465) rebuilds chosen keys from a low rank and fetches values; here K and V
come from one latent of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from inference_engine.kernels.components import IndexShape
from inference_engine.kv.archives.latent import (
    Latent,
    bytes_of_position,
    default_bytes_per_token,
    exact_bytes_per_token,
)
from inference_engine.kv.archives.restorer import Recompute, Restorer
from inference_engine.kv.archives.tapped import TappedLatent
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.parts.archived import ArchivedEntries
from inference_engine.kv.parts.component_index import TokenSelector
from inference_engine.kv.parts.restored_entries import RestoredEntries
from inference_engine.kv.parts.selected import SelectedEntries
from inference_engine.kv.parts.streamed import StreamedEntries
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategies.token_options import (
    BITS,
    LEAST_RANK,
    RUN,
    default_rank,
    require_components,
    require_index,
    require_rank,
    require_window,
    trial_rank,
)
from inference_engine.kv.strategy import (
    F_THETA,
    F_THETA_AND_COMPONENTS,
    LATENT,
    LATENT_AND_COMPONENTS,
    KVStrategy,
    require,
)

if TYPE_CHECKING:
    from inference_engine.kv.context import KVContext

_SOURCES = ("latent", "drafter", "recompute")
# By mode, how an active session reads old entries.
_MODES: dict[str, type[ArchivedEntries]] = {
    "hold": RestoredEntries,
    "stream": StreamedEntries,
    "select": SelectedEntries,
}
_APPENDED = ("all", "select")
_CHOSEN = 512  # tokens of choice that a generated token reads by default


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(KVStrategy):
    """Keeps `sink` first and `window` last positions exact; `source` restores the others."""

    name: ClassVar[str] = "restored"

    sink: int = 4
    window: int = 1024
    source: str = "recompute"
    bytes_per_token: int | None = None  # of a code; None: a twentieth of the entries in bfloat16
    mode: str = "hold"
    resident_latent_bytes: int | None = None  # on the device; older ones go to the second tier. None: no limit
    # Of mode `select`. Entries that a generated token may read; components, bits of each, positions that share a
    # rotation; bytes of restored entries that an active session holds. None: as the model needs. What appended tokens
    # read: all of them, or their own choice. None: all.
    budget: int | None = None
    rank: int | None = None
    bits: int | None = None
    run: int | None = None
    awake_bytes: int | None = None
    appended: str | None = None

    def __post_init__(self) -> None:
        require(self.sink >= 0, "sink", f"must be ≥ 0, got {self.sink}")
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")
        require(
            self.source in _SOURCES, "source", f"there is no source {self.source!r}; there are {', '.join(_SOURCES)}"
        )
        require(self.mode in _MODES, "mode", f"there is no mode {self.mode!r}; there are {', '.join(_MODES)}")
        require(
            self.mode == "hold" or self.has_codes,
            "mode",
            f"{self.mode} would be a prefill for each token with source {self.source}; use hold, or source latent",
        )
        if self.bytes_per_token is not None:
            require(self.has_codes, "bytes_per_token", f"has no meaning with source {self.source}")
            require(self.bytes_per_token >= 1, "bytes_per_token", f"must be ≥ 1, got {self.bytes_per_token}")
        if self.resident_latent_bytes is not None:
            limit = self.resident_latent_bytes
            require(self.source == "latent", "resident_latent_bytes", f"has no meaning with source {self.source}")
            require(limit >= 0, "resident_latent_bytes", f"must be ≥ 0, got {limit}")
            require(
                not self.selects,
                "resident_latent_bytes",
                "has no meaning with mode select, which reads latents of choice",
            )
        for option in ("budget", "rank", "bits", "run", "awake_bytes"):
            asked = getattr(self, option)
            require(asked is None or self.selects, option, f"has no meaning with mode {self.mode}")
            require(asked is None or asked >= 1, option, f"must be ≥ 1, got {asked}")
        require(self.appended is None or self.selects, "appended", f"has no meaning with mode {self.mode}")
        require(
            self.appended is None or self.appended in _APPENDED,
            "appended",
            f"must be one of {', '.join(_APPENDED)}, got {self.appended!r}",
        )
        require_index(self.bits, self.run)
        if self.budget is not None:
            least = self._chooser(0).most_entries
            require(
                self.budget > least,
                "budget",
                f"must hold the sink, the window, a tile of the index and a token of choice, {least + 1} entries; got "
                f"{self.budget}",
                least=least + 1,
            )

    @property
    def has_codes(self) -> bool:
        """Is there a code of each position, which its entries are restored from?"""
        return self.source != "recompute"

    @property
    def selects(self) -> bool:
        """Are tokens of choice restored, while they are read?"""
        return self.mode == "select"

    @property
    def calibrated(self) -> str:
        if self.source == "drafter":
            return F_THETA_AND_COMPONENTS if self.selects else F_THETA
        if self.selects:
            return LATENT_AND_COMPONENTS
        return LATENT if self.source == "latent" else ""

    @property
    def _chosen(self) -> int:
        """Tokens of choice that a generated token reads."""
        return _CHOSEN if self.budget is None else self.budget - self._chooser(0).most_entries

    def _chooser(self, count: int) -> TokenSelector:
        shape = IndexShape(rank=self.rank or LEAST_RANK, bits=self.bits or BITS, run=self.run or RUN)
        return TokenSelector(shape=shape, sink=self.sink, window=self.window, count=count, appended=self._all_choose)

    @property
    def _all_choose(self) -> bool:
        return self.appended == "select"

    def check(self, geometry: Geometry) -> None:
        SinkWindow(sink=self.sink, window=self.window).check(geometry)
        self.restorer().check(geometry, range(len(geometry.layers)))
        if not self.selects:
            return
        require_window(self.window, geometry)
        require_rank(self.rank, geometry)
        least = self._chosen * bytes_of_position(geometry)
        require(
            self.restorer().held(geometry) >= self._chosen,
            "awake_bytes",
            f"must hold the {self._chosen} tokens that one step chooses, {least} bytes; got {self.awake_bytes}",
            least=least,
        )

    def resolved(self, geometry: Geometry, *, has_components: bool = False) -> Restored:
        if not self.has_codes:
            return self
        found = replace(self, bytes_per_token=self.bytes_per_token or default_bytes_per_token(geometry))
        if not self.selects:
            return found
        rank = self.rank or default_rank(geometry)
        found = replace(found, rank=rank, bits=self.bits or BITS, run=self.run or RUN)
        found = replace(found, budget=self._chooser(self._chosen).most_entries)
        held = found.restorer().held(geometry)
        awake_bytes = self.awake_bytes or held * bytes_of_position(geometry)
        return replace(found, awake_bytes=awake_bytes, appended=self.appended or "all")

    def geometry(self, geometry: Geometry) -> Geometry:
        """Segments are longer where a device takes several at once and the window holds so many: appended tokens then
        read, or restore, old entries for more of them at a time. Where each has its own choice restored, they would
        gain nothing."""
        at_once = geometry.in_long_segments()
        reads_together = self.source == "latent" and not self._all_choose
        return at_once if reads_together and self.window >= at_once.segment_tokens else geometry

    def ready(self, context: KVContext) -> None:
        self.restorer().ready(context)
        if self.selects:
            require_components(context, self._chooser(0).shape.rank, "mode", "mode hold or stream")

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        if not self.selects:
            return LayerRule(sink=self.sink, exact=self.window)
        # A tile of the index is chosen from or read as a whole, and the window begins at one.
        chooser = self._chooser(self._chosen)
        return LayerRule(sink=self.sink, exact=self.window + chooser.shape.tile, mechanisms=(chooser,))

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Restored, ...]:
        exact = exact_bytes_per_token(geometry)
        if not exact:
            return (cls(sink=2, window=8),)
        latent = cls(sink=2, window=8, source="latent", bytes_per_token=exact)
        rank = trial_rank(geometry)
        return (
            cls(sink=2, window=8),
            latent,
            replace(latent, mode="stream"),
            replace(latent, window=16, mode="select", budget=96, rank=rank, bits=4, run=1),
        )

    def restorer(self) -> Restorer:
        if self.source == "recompute":
            return Recompute(_MODES[self.mode])
        latent = Latent(
            _MODES[self.mode],
            self.bytes_per_token,
            self.resident_latent_bytes,
            chosen=self._chosen if self.selects else 0,
            all_choose=self._all_choose,
            awake_bytes=self.awake_bytes,
        )
        if self.source == "latent":
            return latent
        tile = self._chooser(0).shape.tile if self.selects else 0
        return TappedLatent.like(latent, exact=self.window + tile)
