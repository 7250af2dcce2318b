"""Calibration of key components: the leading directions of each layer's unrotated keys, from a prefill of some text.

The model runs as it serves, on its own backend. Keys are read from the session's entries and rotated back, as the index
reads them (`kv/parts/component_index.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.base import Forward
from inference_engine.decode.verifier import Block, Verifier
from inference_engine.errors import InvalidArgument, NonFiniteEntries
from inference_engine.kernels.components import KeyComponents
from inference_engine.kv.geometry import IMMOVABLE, Geometry
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full

MOST_COMPONENTS = 64
_STEP_TOKENS = 512
# The first tokens of a text have keys unlike all others, and are always read.
_SINK = 4
_LEAST_SPREAD = 1e-6  # of the largest: a channel that never changes still needs a step


def component_layers(geometry: Geometry) -> tuple[int, ...]:
    """The layers whose queries may read every entry, and whose keys can be rotated back."""
    return tuple(
        index
        for index, layer in enumerate(geometry.layers)
        if layer.native_window is None and layer.rotary != IMMOVABLE
    )


def fit_components(
    forward: Forward, sequences: Tensor, *, advance: Callable[[int], object] = lambda _tokens: None
) -> dict[int, KeyComponents]:
    """Components of each layer that needs them, over token ids [n, T]. Not while an engine works on `forward`.

    Raises InvalidArgument where no layer needs them, NonFiniteEntries for keys that are no finite numbers.
    """
    length = sequences.shape[1]
    geometry = forward.geometry(page_tokens=16, segment_tokens=256)
    layers = component_layers(geometry)
    if not layers:
        raise InvalidArgument("model", "no layer of this model reads every entry, with keys that can be rotated back")
    context = forward.open(geometry, 2 * Full().bound(geometry, length).sustained_bytes)
    verifier = Verifier(forward, context)
    moments = {layer: _Moments() for layer in layers}
    for ids in sequences:
        kv = SessionKV(Full(), context, length)
        try:
            _prefill(verifier, kv, ids)
            _collect(kv, moments)
        finally:
            kv.release()
        advance(length)
    return {layer: moments[layer].components(layer) for layer in layers}


def _prefill(verifier: Verifier, kv: SessionKV, ids: Tensor) -> None:
    rest = ids.numpy().astype(np.uint32)
    while len(rest):
        some, rest = np.split(rest, [min(_STEP_TOKENS, kv.room())])
        verifier.run([Block(kv=kv, token_ids=some, wanted_logits=0 if len(rest) else 1)])
        kv.commit(kv.length + len(some))


def _collect(kv: SessionKV, moments: dict[int, _Moments]) -> None:
    for group in kv.groups:
        positions = np.sort(group.held[group.held >= _SINK])
        if not any(layer in moments for layer in group.layer_set.layers):
            continue
        keys, _ = group.read_entries(positions)
        for layer, states in zip(group.layer_set.layers, group.moved(keys, -positions), strict=True):
            if layer in moments:
                moments[layer].add(states.transpose(0, 1).double())


class _Moments:
    """Sums over a layer's keys [Hkv, n, D]."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._products = torch.zeros(())

    def add(self, keys: Tensor) -> None:
        self._count += keys.shape[1]
        self._sum = self._sum.to(keys) + keys.sum(1)
        self._products = self._products.to(keys) + keys.mT @ keys

    def components(self, layer: int) -> KeyComponents:
        mean = self._sum / self._count
        covariance = (self._products / self._count - mean[:, :, None] * mean[:, None]).cpu()
        if not bool(torch.isfinite(covariance).all()):
            raise NonFiniteEntries(layer, "keys")
        spreads, directions = torch.linalg.eigh(covariance)
        spreads, directions = spreads.flip(-1), directions.flip(-1)
        kept = min(MOST_COMPONENTS, spreads.shape[-1])
        deviations = spreads.clamp(min=0).sqrt()
        floor = _LEAST_SPREAD * deviations[:, :1].clamp(min=_LEAST_SPREAD)
        return KeyComponents(
            mean=mean.float().cpu().contiguous(),
            basis=directions[..., :kept].float().contiguous(),
            deviations=deviations.maximum(floor)[:, :kept].float().contiguous(),
        )
