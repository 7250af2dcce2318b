"""A stored codec of which a server knows everything at its start but the tensors, which are read at first use.

The manifest says which layers it covers, for which weights it is, and which rates it gives: enough to answer a session
that cannot have it. Its tensors take tens of megabytes, which a server without such sessions does not need.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from inference_engine.kernels.trellis import Trellis
from inference_engine.kv.context import GroupAnalyser, LayerDecoder
from inference_engine.models.verified import Look, look_of
from kv_cache_proposer.f_theta.codec import SCALE_BYTES, LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.codec_files import StatedCodec, load_stated, read_stated
from kv_cache_proposer.f_theta.tap_codec import DrafterLatent
from kv_cache_proposer.f_theta.tap_codec_files import StatedTapCodec, load_tap_codec, read_stated_tap_codec

logger = logging.getLogger(__name__)

C = TypeVar("C", LatentCodec, DrafterLatent)
S = TypeVar("S", StatedCodec, StatedTapCodec)


class _Late(ABC, Generic[C, S]):
    """A codec that reads its tensors when `at`, or what codes, is called first. Safe from any thread.

    Then it raises LatentError for tensors that are damaged, or of another codec than when it was opened; again at each
    call, until the file is another one.
    """

    def __init__(self, stated: S, device: torch.device | str, kernels: str, trellis: Trellis | None = None):
        self._stated: S = stated
        self._device, self._kernels, self._trellis = device, kernels, trellis
        self._lock = threading.Lock()
        self._codec: C | None = None
        self._failed: tuple[Look | None, LatentError] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(shape.layer for group in self._stated.groups for shape in group.shapes)

    @property
    def bytes_per_token(self) -> int:
        return self._stated.bytes_per_token

    @property
    def least_bytes_per_token(self) -> int:
        return len(self._stated.groups) * (SCALE_BYTES + 1)

    @abstractmethod
    def _load(self) -> C: ...

    def load(self) -> C:
        """The codec itself. Raises LatentError, or BackendError for kernels that the device cannot have."""
        if (codec := self._codec) is not None:
            return codec
        with self._lock:
            if self._codec is None:
                self._codec = self._read()
            return self._codec

    def using(self, trellis: Trellis) -> Self:
        return type(self)(self._stated, self._device, self._kernels, trellis)

    def has(self, bytes_per_token: int) -> bool:
        return self._codec is not None and self._codec.has(bytes_per_token)

    def at(self, bytes_per_token: int) -> C:
        return self.load().at(bytes_per_token)

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        return self.load().decode(codes, layers)

    def decoder(self, layer: int) -> LayerDecoder:
        return self.load().decoder(layer)

    def _read(self) -> C:
        path = self._stated.path
        look = _look(path)
        if self._failed is not None and self._failed[0] == look:
            raise self._failed[1]
        began = time.perf_counter()
        try:
            codec = self._load()
        except LatentError as error:
            self._failed = look, error
            raise
        except OSError as error:
            raise LatentError(f"{path}: cannot be read: {error}") from error
        logger.info("%s was read in %.2f s: %.1f MB", path, time.perf_counter() - began, codec.shared_bytes / 1e6)
        return codec if self._trellis is None else codec.using(self._trellis)


class LateCodec(_Late[LatentCodec, StatedCodec]):
    """Implements TokenCodec."""

    def _load(self) -> LatentCodec:
        return load_stated(self._stated, device=self._device, kernels=self._kernels)

    def encode(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        return self.load().encode(keys, values)

    def analysers(self) -> Sequence[GroupAnalyser]:
        return self.load().analysers()

    def encode_numbers(self, numbers: Sequence[Tensor]) -> Tensor:
        return self.load().encode_numbers(numbers)


class LateTapCodec(_Late[DrafterLatent, StatedTapCodec]):
    """Implements TapCodec."""

    def _load(self) -> DrafterLatent:
        return load_tap_codec(self._stated, device=self._device, kernels=self._kernels)

    @property
    def digest(self) -> str:
        return self._stated.tensors_sha256

    @property
    def identity(self) -> Mapping[str, Any]:
        """What identifies it in a record."""
        manifest = self._stated.manifest
        return {
            "tensors_sha256": self.digest,
            "bytes_per_token": self.bytes_per_token,
            "drafter_sha256": self.drafter_digest,
            "calibration_tokens": manifest.calibration_tokens,
            "recipe": {name: value for name, value in manifest.recipe.items() if not isinstance(value, dict)},
            "seeds": dict(manifest.seeds),
        }

    @property
    def drafter_digest(self) -> str:
        """SHA-256 of the tensors of the drafter that it belongs to."""
        return self._stated.drafter_digest

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._stated.tap_layers

    def encode_taps(self, taps: Tensor) -> Tensor:
        return self.load().encode_taps(taps)


def open_codec(
    folder: Path, *, target_digest: str, device: torch.device | str = "cpu", kernels: str = "auto"
) -> LateCodec:
    """Raises as `read_stated` does."""
    return LateCodec(read_stated(folder, target_digest=target_digest), device, kernels)


def open_tap_codec(
    folder: Path, *, target_digest: str, device: torch.device | str = "cpu", kernels: str = "auto"
) -> LateTapCodec:
    """Raises as `read_stated_tap_codec` does."""
    return LateTapCodec(read_stated_tap_codec(folder, target_digest=target_digest), device, kernels)


def _look(path: Path) -> Look | None:
    try:
        return look_of(path)
    except OSError:
        return None
