"""Runs methods of papers (`published_methods.py`) through the seam that sessions run through, without an engine.

    prompt     read with full attention, a chunk at a time, by all sessions of a batch side by side
    after it   a token at a time; each layer that may read everything sees what the method's choice lets it see

All sessions of a batch have prompts of one length, so that a layer's entries are one tensor. One prompt serves every
method: what follows it is written over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kernels.expanded_attention import OwnQueries
from inference_engine.kv.geometry import IMMOVABLE
from inference_engine.models.seam import Seam
from laboratory.evaluation.divergence import Floats
from laboratory.evaluation.models import Target
from laboratory.evaluation.passages import Passage
from laboratory.evaluation.prompts import Prompt
from laboratory.evaluation.published_methods import LayerChoice, Method, Prompted, entry_bytes, per_group
from laboratory.evaluation.tasks import TASKS, Grade

T = TypeVar("T")

_CHUNK_TOKENS = 2048  # of a prompt, of all sessions together
_OBSERVED = 64  # last queries of a prompt that are kept
_HELD = 8  # of free memory, the part that entries of one batch may take
_CALIBRATION_TOKENS = 2048


class _Seams:
    """Implements Borrower. Raises InvalidArgument for a model that is not on torch."""

    def of_modules(self, seam: Seam) -> Seam:
        return seam

    def of_program(self, _: object) -> Seam:
        raise InvalidArgument("published", "methods of papers run on torch: give --backend torch, or a GPU")

    of_matrices = of_program


def seam_of(target: Target) -> Seam:
    """Raises InvalidArgument for a target that is not on torch."""
    return target.forward.lend(_Seams())


def calibrate(target: Target, methods: Sequence[Method], kind: str, seed: int) -> None:
    """Show methods that need it keys of text that nothing is measured on."""
    needing = [method for method in methods if method.calibrated]
    if not needing:
        return
    seam = seam_of(target)
    tokens = min(_CALIBRATION_TOKENS, seam.trained_positions)
    ids = target.texts.filler(kind, tokens, f"{seed}/calibration")
    sessions = _Sessions(seam, target.forward.device, count=1, capacity=tokens)
    sessions.read_prompts(torch.tensor([ids]))
    for method in needing:
        for layer in sessions.free_layers:
            method.calibrate(layer, sessions.keys[layer][0])


def grade_all(
    target: Target, methods: Sequence[Method], prompts: Sequence[Prompt], task: str
) -> dict[str, list[Grade]]:
    """Each method's grades of greedy answers, in the order of the prompts, which have one length."""
    answer_tokens = TASKS[task].answer_tokens
    found: dict[str, list[Grade]] = {str(method): [] for method in methods}
    for some in _batches(target, prompts, len(prompts[0].token_ids) + answer_tokens):
        sessions = _Sessions(
            seam_of(target), target.forward.device, count=len(some), capacity=len(some[0].token_ids) + answer_tokens
        )
        first = sessions.read_prompts(torch.tensor([prompt.token_ids for prompt in some]))
        for method in methods:
            sessions.choose(method)
            answers = _answers(sessions, first, answer_tokens, target.stop_ids)
            texts = [target.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            found[str(method)] += [prompt.question.grade(text) for prompt, text in zip(some, texts, strict=True)]
    return found


def divergences(target: Target, methods: Sequence[Method], passages: Sequence[Passage]) -> dict[str, list[Floats]]:
    """KL(full ‖ method) of every forced token, an array for each passage; passages have one length."""
    found: dict[str, list[Floats]] = {str(method): [] for method in methods}
    capacity = len(passages[0].prefix) + len(passages[0].forced)
    for some in _batches(target, passages, capacity):
        sessions = _Sessions(seam_of(target), target.forward.device, count=len(some), capacity=capacity)
        first = sessions.read_prompts(torch.tensor([passage.prefix for passage in some]))
        forced = torch.tensor([passage.forced for passage in some])
        full = _forced(sessions, first, forced)
        for method in methods:
            sessions.choose(method)
            ours = _forced(sessions, first, forced)
            apart = (full.exp() * (full - ours)).sum(-1, dtype=torch.float64).cpu().numpy()
            found[str(method)] += list(apart)
    return found


def _answers(sessions: _Sessions, first: Tensor, count: int, stop_ids: Sequence[int]) -> list[list[int]]:
    """Greedy, each up to a stop id. first: logits [B, V] after the prompts."""
    sessions.forget_answers()
    answers: list[list[int]] = [[] for _ in range(sessions.count)]
    is_over = [False] * sessions.count
    logits = first
    for place in range(count):
        chosen = logits.argmax(-1)
        for index, token_id in enumerate(chosen.tolist()):
            is_over[index] |= token_id in stop_ids
            if not is_over[index]:
                answers[index].append(token_id)
        if all(is_over) or place == count - 1:
            break
        logits = sessions.read(chosen[:, None])
    return answers


def _forced(sessions: _Sessions, first: Tensor, forced: Tensor) -> Tensor:
    """Log-probabilities [B, n, V] before each forced token; with no method chosen, of full attention."""
    sessions.forget_answers()
    found = [first, *(sessions.read(forced[:, place : place + 1]) for place in range(forced.shape[1] - 1))]
    return torch.stack(found, dim=1).float().log_softmax(-1)


def _batches(target: Target, items: Sequence[T], tokens: int) -> Iterator[Sequence[T]]:
    """As many at once as memory has room for."""
    each = sum(map(entry_bytes, seam_of(target).layers)) // 2 * target.forward.compute_dtype.itemsize * tokens
    count = max(1, int(target.forward.free_bytes() // _HELD // each))
    return (items[start : start + count] for start in range(0, len(items), count))


class _Sessions:
    """Implements AttentionPlan for `count` sessions that have as many tokens each: all K and V, layer by layer."""

    def __init__(self, seam: Seam, device: torch.device, *, count: int, capacity: int) -> None:
        self.count = count
        self._seam, self._device = seam, device
        self._length = self._prompt = 0
        self._choices: dict[int, LayerChoice] = {}
        self._queries: dict[int, tuple[Tensor, float]] = {}

        def entries() -> list[Tensor]:
            return [
                torch.zeros((count, layer.kv_heads, capacity, layer.head_dim), dtype=seam.dtype, device=device)
                for layer in seam.layers
            ]

        self.keys, self._values = entries(), entries()

    @property
    def free_layers(self) -> list[int]:
        """Those that may read everything."""
        return [index for index, layer in enumerate(self._seam.layers) if layer.native_window is None]

    def read_prompts(self, token_ids: Tensor) -> Tensor:
        """token_ids [B, S]. Returns logits [B, V] after them."""
        step = max(1, _CHUNK_TOKENS // self.count)
        logits = torch.empty(0)
        for start in range(0, token_ids.shape[1], step):
            logits = self.read(token_ids[:, start : start + step])
        self._prompt = self._length
        return logits

    @torch.inference_mode()
    def read(self, token_ids: Tensor) -> Tensor:
        """The next tokens [B, n] of each session. Returns logits [B, V] after the last."""
        count = token_ids.shape[1]
        positions = np.tile(np.arange(self._length, self._length + count, dtype=np.int64), self.count)
        kept = torch.arange(1, self.count + 1, device=self._device) * count - 1
        with self._seam.attending(self, positions):
            out = self._seam.model(
                input_ids=token_ids.to(self._device).reshape(1, -1),
                position_ids=torch.from_numpy(positions)[None].to(self._device),
                use_cache=False,
                logits_to_keep=kept,
            )
        self._length += count
        logits: Tensor = out.logits[0]
        return logits

    def forget_answers(self) -> None:
        """Back to the prompts' end."""
        self._length = self._prompt

    @torch.inference_mode()
    def choose(self, method: Method) -> None:
        """From now on, what is read after the prompts sees of them what this method sees."""
        self._choices = {}
        for layer in self.free_layers:
            queries, scaling = self._queries[layer]
            self._choices[layer] = method.choice(
                Prompted(
                    keys=self.keys[layer][:, :, : self._prompt],
                    queries=queries,
                    scaling=scaling,
                    layer=layer,
                    turn=self._turner(layer),
                )
            )

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
        head_sinks: Tensor | None,
        own: OwnQueries | None,
    ) -> Tensor:
        if own is not None:
            raise ModelError("methods of papers are not here for models with latent attention")
        if softcap is not None or head_sinks is not None:
            raise ModelError("methods of papers are not here for models with soft-capping or head sinks")
        if keys is None or values is None:
            raise ModelError("methods of papers are not here for models whose layers read the entries of others")
        own_queries, own_keys, own_values = (
            states[0].reshape(states.shape[1], self.count, -1, states.shape[3]).transpose(0, 1)
            for states in (queries, keys, values)
        )
        end = self._length + own_queries.shape[2]
        self.keys[layer][:, :, self._length : end] = own_keys
        self._values[layer][:, :, self._length : end] = own_values
        choice = self._choices.get(layer)
        if choice is None:
            self._remember(layer, own_queries, scaling)
            out = self._everything(layer, own_queries, end, scaling)
        else:
            out = self._chosen(choice, layer, own_queries[:, :, 0], end, scaling)[:, :, None]
        return out.transpose(1, 2).reshape(1, -1, queries.shape[1], queries.shape[3])

    def _everything(self, layer: int, queries: Tensor, end: int, scaling: float) -> Tensor:
        """Causal attention, within a window where the layer has one."""
        places = torch.arange(end, device=queries.device)
        away = places[self._length :, None] - places[None]
        window = self._seam.layers[layer].native_window
        mask = away >= 0 if window is None else (away >= 0) & (away < window)
        return functional.scaled_dot_product_attention(
            queries,
            self.keys[layer][:, :, :end],
            self._values[layer][:, :, :end],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=True,
        )

    def _chosen(self, choice: LayerChoice, layer: int, queries: Tensor, end: int, scaling: float) -> Tensor:
        """queries [B, Hq, D], one a session; everything after the prompt is read."""
        kv_heads = choice.keys.shape[1]
        keys = torch.cat([choice.keys, self.keys[layer][:, :, self._prompt : end]], dim=2)
        scores = (per_group(queries, kv_heads) @ keys.mT).float() * scaling
        seen = functional.pad(choice.seen(queries), (0, end - self._prompt), value=True)
        weights = scores.masked_fill(~per_group(seen, kv_heads), -torch.inf).softmax(-1)
        return (weights.to(queries.dtype) @ self._values[layer][:, :, :end]).flatten(1, 2)

    def _remember(self, layer: int, queries: Tensor, scaling: float) -> None:
        before = self._queries.get(layer)
        joined = queries if before is None else torch.cat([before[0], queries], dim=2)
        if not self._prompt:
            self._queries[layer] = (joined[:, :, -_OBSERVED:], scaling)

    def _turner(self, layer: int) -> _Turner:
        name = self._seam.layers[layer].rotary
        if name == IMMOVABLE:
            raise ModelError(f"layer {layer} changes its keys after rotation: they cannot be rotated back")
        return _Turner(self._seam, name)


class _Turner:
    """Implements Turn."""

    def __init__(self, seam: Seam, name: str) -> None:
        self._seam, self._name = seam, name

    def __call__(self, keys: Tensor, *, back: bool) -> Tensor:
        shifts = torch.arange(keys.shape[2])
        turned = self._seam.rotate(keys.flatten(0, 1), -shifts if back else shifts, self._name)
        return turned.view(keys.shape)
