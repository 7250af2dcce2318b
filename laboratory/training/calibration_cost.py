"""The estimated cost of calibrating a latent: from short trials of the model on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from rich.filesize import decimal
from torch import nn

from inference_engine.kv.geometry import Geometry

_TRIAL_TOKENS, _TRIAL_WIDTH = 256, 512
# In forwards: with statistics of what it gave; with a gradient, and the predictions that it is of.
_READING, _SENSITIVITY = 1.3, 3.0
# Of `fit`: numbers of eight bytes held for one group of W, in W squared.
_SQUARES = 6
# Of entries that are read: as they came, and joined.
_COPIES = 2
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationCost:
    """An estimate. codec_bytes: the most that the codec takes, in the file and in a server's memory."""

    seconds: float
    memory_bytes: int
    codec_bytes: int

    def __str__(self) -> str:
        time_needed = f"{self.seconds / 60:.0f} minutes" if self.seconds >= 90 else f"{self.seconds:.0f} s"
        return (
            f"about {time_needed}, {decimal(self.memory_bytes)} of memory meanwhile; it will take at most "
            f"{decimal(self.codec_bytes)}, for all sessions together"
        )

    @classmethod
    def measured(
        cls,
        model: nn.Module,
        geometry: Geometry,
        *,
        layers: Sequence[int],
        tokens: int,
        tokens_at_once: int,
        sensitivity_tokens: int,
        conversations: int,
        conversation_tokens: int,
        group_layers: int,
        components: int | None,
    ) -> CalibrationCost:
        """By a forward of some tokens, a step of `conversations` tokens and a small eigen-decomposition, each timed.

        conversations: held side by side, `conversation_tokens` each; 0 for none. components: how many of each group are
        looked for; None: all. To find some takes about as long as to decompose a matrix of so many rows.
        """
        device = next(model.parameters()).device
        body = getattr(model, "base_model", model)

        def forward(shape: tuple[int, int]) -> None:
            body(input_ids=torch.ones(shape, dtype=torch.long, device=device), use_cache=False)

        small = torch.rand(_TRIAL_WIDTH, _TRIAL_WIDTH, dtype=torch.float64, device=device)
        trained = min(_TRIAL_TOKENS, geometry.trained_positions)
        with torch.no_grad():
            each = _seconds(lambda: forward((1, trained)), device) / trained
            step = _seconds(lambda: forward((conversations, 1)), device) if conversations else 0.0
            decomposed = _seconds(lambda: torch.linalg.eigh(small @ small.T), device)
        each_layer = [2 * geometry.layers[layer].kv_heads * geometry.layers[layer].head_dim for layer in layers]
        widths = [sum(each_layer[at : at + group_layers]) for at in range(0, len(layers), group_layers)]
        seconds = each * (_READING * tokens + _SENSITIVITY * sensitivity_tokens) + step * conversation_tokens
        seconds += sum(decomposed * (min(width, components or width) / _TRIAL_WIDTH) ** 3 for width in widths)
        if device.type == "cpu":
            held = int(psutil.Process().memory_info().rss)  # the model, and all that was imported for this
        else:
            held = sum(parameter.nbytes for parameter in model.parameters())
        # What was read is given back before the fit, but the allocator keeps most of it.
        queries = sum(geometry.layers[layer].query_heads * geometry.layers[layer].head_dim for layer in layers)
        held += tokens_at_once * _FLOAT32_BYTES * (_COPIES * sum(each_layer) + queries)
        held += 8 * (sum(width**2 for width in widths) + _SQUARES * max(widths, default=0) ** 2)
        return cls(seconds=seconds, memory_bytes=held, codec_bytes=sum(2 * width**2 for width in widths))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of a second call: the first one allocates."""
    found = 0.0
    for _ in range(2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found = time.perf_counter() - began
    return found
