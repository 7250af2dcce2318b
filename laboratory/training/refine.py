"""Refines a codec by gradient, with the coding in the loop: KL to the model's own predictions, from restored entries.

    entries → analysis → ÷ deviation · scale → levels of its codes → · deviation · scale → components → entries
              trained                          passed through                        trained    → model → KL

Closed form minimises a square whose weights are the same for every token; here the model itself says what an error
costs, token by token. Rounding to a level has no slope: going back it is passed through as if it were not there.
Levels, bits and deviations stay, so a refined codec holds the same bytes a token. It is kept only where text that was
not trained on gains, at every rate.
Source: passing gradients through a rounding is Bengio et al., arXiv 1308.3432.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.f_theta.codec import GroupCoder, LatentCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.components import Components
from kv_cache_proposer.f_theta.group_layout import join
from laboratory.training.capture import LayerStates, capture
from laboratory.training.distant import seeing
from laboratory.training.divergence import divergences, log_probabilities, measure_divergence, restored, through

Advance = Callable[[int], None]  # called with the steps done since the last call

# A step moves restored entries by at most about this part of what coding loses already: Adam moves every entry alike,
# and on text like that of the step the moves of an entry's numbers add up.
STEP_SIZE = 0.05
_BETAS = (0.9, 0.99)
_WARM_UP_STEPS = 5  # until the running means say something
# Between two looks at the text held out; and how many looks without gain end it.
_LOOK_STEPS, _PATIENCE = 20, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Refinement:
    """What became of it. start, best: mean KL on the text held out by bytes per token; best is start if nothing gained.

    steps: after how many the best was found, 0 if nothing gained.
    """

    start: dict[int, float]
    best: dict[int, float]
    steps: int

    @property
    def gain(self) -> float:
        """The part of KL that is gone, in the geometric mean over rates."""
        return 1.0 - math.exp(-_gain(self.start, self.best) / len(self.start))


def refine(
    model: PreTrainedModel,
    codec: LatentCodec,
    training: Tensor,
    held_out: Tensor,
    *,
    rates: Sequence[int],
    steps: int,
    sink: int,
    window: int,
    step_size: float = STEP_SIZE,
    seed: int = 0,
    advance: Advance | None = None,
) -> tuple[LatentCodec, Refinement]:
    """A codec of the same bytes that restores better, or `codec` itself if none was found.

    training, held_out: token ids [sequences, T]; one sequence of `training` a step, at one of `rates`, bytes per token,
    in turn. The model must be on the codec's device; its parameters stay. On a GPU all layers' scores are held.
    """
    if not rates or any(rate > codec.bytes_per_token for rate in rates):
        raise LatentError(f"rates must be at most the codec's {codec.bytes_per_token} bytes, got {list(rates)}")
    trained = _Trained(codec)
    precision = codec.coders[0].basis.components.precision
    look = _Looks(model, held_out, rates, codec.layers, sink, window)
    best, start = codec, look(codec)
    refinement = Refinement(start=start, best=start, steps=0)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(trained.steps(model, training[0], rates[0]), betas=_BETAS)
    fruitless = 0
    for step in range(1, steps + 1):
        tokens = training[int(torch.randint(len(training), (), generator=generator))].to(model.device)
        for group in optimiser.param_groups:
            group["lr"] = step_size * group["unit"] * min(step / _WARM_UP_STEPS, 1.0 - (step - 1) / steps)
        loss = _loss(model, tokens, trained, rates[step % len(rates)], sink, window)
        # Asked for by name, so that none comes to rest in the model's own parameters.
        for matrix, gradient in zip(trained.matrices, torch.autograd.grad(loss, trained.matrices), strict=True):
            matrix.grad = gradient
        optimiser.step()
        if advance is not None:
            advance(1)
        if step % _LOOK_STEPS and step != steps:
            continue
        candidate = trained.codec(precision)
        found = look(candidate)
        is_better = _gain(refinement.best, found) > 0 and all(found[rate] <= start[rate] for rate in rates)
        if is_better:
            best, refinement = candidate, replace(refinement, best=found, steps=step)
        fruitless = 0 if is_better else fruitless + 1
        if fruitless == _PATIENCE:
            break
    return best, refinement


def _gain(before: dict[int, float], after: dict[int, float]) -> float:
    """How much lower, in the sum of logarithms over rates."""
    tiny = torch.finfo(torch.float64).tiny
    return sum(math.log(max(before[rate], tiny)) - math.log(max(after[rate], tiny)) for rate in before)


class _Looks:
    """Mean KL on the text held out, at each rate."""

    def __init__(
        self,
        model: PreTrainedModel,
        held_out: Tensor,
        rates: Sequence[int],
        layers: Sequence[int],
        sink: int,
        window: int,
    ) -> None:
        self._model, self._held_out, self._rates = model, held_out, rates
        self._layers, self._sink, self._window = layers, sink, window

    def __call__(self, codec: LatentCodec) -> dict[int, float]:
        methods = {str(rate): through(codec.at(rate)) for rate in self._rates}
        found = measure_divergence(
            self._model, self._held_out, methods, layers=self._layers, sink=self._sink, window=self._window
        )
        return {rate: found[str(rate)].mean for rate in self._rates}


def _loss(model: PreTrainedModel, tokens: Tensor, trained: _Trained, rate: int, sink: int, window: int) -> Tensor:
    """Mean KL over one sequence's positions."""
    with torch.no_grad():
        exact = log_probabilities(model(input_ids=tokens[None], use_cache=False).logits, sink + window)
        (states,) = capture(model, [tokens[None]], layers=trained.layers)
    with torch.enable_grad(), seeing(model, trained.layers) as forward:
        keys, values = trained.through(states, rate)
        distant = restored(trained.layers, keys, values, sink=sink, window=window)
        return divergences(exact, log_probabilities(forward(tokens[None], distant), sink + window)).mean()


class _Trained:
    """The matrices of a codec while they are trained, in units in which steps of one size suit all their entries.

    inward: analysis ÷ deviation, weighted vectors to units. outward: components · deviation, units to weighted vectors.
    """

    def __init__(self, codec: LatentCodec) -> None:
        self._codec = codec
        self.layers = codec.layers
        self.inward: list[Tensor] = []
        self.outward: list[Tensor] = []
        for part in codec.coders:
            basis = part.basis
            self.inward.append(((basis.analysis or basis.components).whole() / basis.deviations).requires_grad_())
            self.outward.append((basis.components.whole() * basis.deviations).requires_grad_())

    @property
    def matrices(self) -> list[Tensor]:
        return [*self.outward, *self.inward]

    def steps(self, model: PreTrainedModel, tokens: Tensor, rate: int) -> list[dict[str, Any]]:
        """For Adam, which moves entries by about `lr`: each matrix, and the `lr` of a whole step, on `tokens` [T]."""
        found = []
        (states,) = capture(model, [tokens[None].to(model.device)], layers=self.layers)
        codec = self._codec.at(rate)
        for index, (part, vectors) in enumerate(zip(codec.coders, _joined(codec, states), strict=True)):
            with torch.no_grad():
                weighted = part.basis.weigh(vectors - part.basis.mean)
                units = self._rounded(part, weighted, index)
                lost = (weighted - units @ self.outward[index][:, : units.shape[1]].T).square().mean().sqrt()
                energy, width = weighted.square().mean().sqrt(), weighted.shape[1]
            found += [
                {"params": [self.outward[index]], "unit": float(lost) / units.shape[1]},
                {"params": [self.inward[index]], "unit": float(lost / energy**2) / width},
            ]
        return found

    def through(self, states: Sequence[LayerStates], rate: int) -> tuple[list[Tensor], list[Tensor]]:
        """The entries as restored at `rate`, with a gradient for what is trained."""
        codec = self._codec.at(rate)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for index, (part, vectors) in enumerate(zip(codec.coders, _joined(codec, states), strict=True)):
            basis = part.basis
            units = self._rounded(part, basis.weigh(vectors - basis.mean), index)
            weighted = units @ self.outward[index][:, : units.shape[1]].T
            widths = [shape.width for shape in basis.group.shapes]
            for place, own in enumerate(torch.split(weighted, widths, dim=1)):
                key, value = basis.unweigh(own, place)
                keys.append(key)
                values.append(value)
        return keys, values

    def _rounded(self, part: GroupCoder, weighted: Tensor, index: int) -> Tensor:
        units = weighted @ self.inward[index][:, : len(part.basis.deviations)]
        return units + (part.rounded(units.detach()) - units.detach())

    @torch.no_grad()
    def codec(self, precision: str) -> LatentCodec:
        """As trained so far."""
        coders = []
        for part, inward, outward in zip(self._codec.coders, self.inward, self.outward, strict=True):
            basis, sizes = part.basis, part.basis.group.head_sizes
            refined = replace(
                basis,
                analysis=Components(entries=inward * basis.deviations, head_sizes=sizes),
                components=Components(entries=outward / basis.deviations, head_sizes=sizes),
            )
            coders.append(replace(part, basis=refined.at_precision(precision)))
        return replace(self._codec, coders=tuple(coders))


def _joined(codec: LatentCodec, states: Sequence[LayerStates]) -> list[Tensor]:
    """The entries as vectors of each of the codec's groups."""
    found, first = [], 0
    for part in codec.coders:
        own = states[first : first + len(part.basis.group.shapes)]
        first += len(own)
        found.append(join(part.basis.group, [one.keys for one in own], [one.values for one in own]))
    return found
