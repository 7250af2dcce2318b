"""Weights in 4 bits whose codes are chosen by what they do to outputs, as those of published checkpoints are.

    nearest   each number by itself
    gptq      one input after the other; what rounding it costs is taken off the inputs that follow
              (Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1)
    awq       inputs with large activations are scaled up before rounding, by a power of their mean that is searched for
              each set of matrices with the same input, and their scales are folded into what makes that input
              (Lin et al., AWQ, arXiv 2306.00978, section 3.2; without its clipping, and without a scale of what
              attention gives, whose heads several queries share)

Nothing here is served: it makes models whose predictions can be measured, in a layout that checkpoints have, of the
Llama kind. Layers are quantised in order, each over what the quantised ones before it give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inference_engine.kernels.quantised import QuantisedMatrix, pack_codes
from inference_engine.models.quantised_linear import QuantisedLinear

METHODS = ("nearest", "gptq", "awq")
GROUP = 64  # inputs with one scale; widths are multiples of it
_TOP = 15  # the largest code of 4 bits
_DAMPING = 0.01  # of the mean of the diagonal, as in GPTQ's section 3.3
_AT_ONCE = 128  # inputs after which the rest is corrected
_MOST_FOLDED = 1e-3  # of the largest output
_POWERS = 20  # that AWQ tries, from 0 on, in steps of a twentieth
# What makes the input of matrices, and these: norms, and a product whose outputs are multiplied with others.
_FOLDS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)


@dataclass(frozen=True, slots=True)
class Quantised:
    """Matrices in 4 bits by the name of their module, and parameters that are others with them."""

    matrices: dict[str, QuantisedMatrix] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        for name, matrix in self.matrices.items():
            module = model.get_submodule(name)
            assert isinstance(module, nn.Linear)
            parent, _, own = name.rpartition(".")
            made = QuantisedLinear(matrix, module.bias, module.weight.dtype)
            setattr(model.get_submodule(parent), own, made.to(module.weight.device))
        for name, numbers in self.parameters.items():
            model.get_parameter(name).copy_(numbers)


@torch.no_grad()
def quantise_model(model: Any, batches: Sequence[Tensor], method: str) -> Quantised:
    """The matrices of all layers of a model of transformers, whose own weights become what the codes stand for.

    batches: ids [1, T] of text to calibrate with. Raises ValueError for widths that are no multiples of GROUP, and by
    "awq" for layers whose scales cannot be folded as in those of the Llama kind.
    """
    found, decoder = Quantised(), model.get_decoder()
    states, given_of = _inputs(model, batches)
    for index, (layer, given) in enumerate(zip(decoder.layers, given_of, strict=True)):
        linears = {name: module for name, module in layer.named_modules() if type(module) is nn.Linear}
        if wrong := [name for name, module in linears.items() if module.in_features % GROUP]:
            raise ValueError(f"layer {index}: {', '.join(wrong)} has inputs that are no multiple of {GROUP}")
        moments = {} if method == "nearest" else _moments(layer, linears, states, given)
        if method == "awq":
            _fold_checked(layer, linears, moments, states[0], given[0])
        for name, module in linears.items():
            matrix = module.weight.float()
            codes, scales, zeros = _by_gptq(matrix, moments[name].squares) if method == "gptq" else _nearest(matrix)
            numbers = _numbers(codes, scales, zeros)
            module.weight.copy_(numbers)
            found.matrices[f"model.layers.{index}.{name}"] = QuantisedMatrix(
                codes=pack_codes(codes.to(torch.uint8), GROUP),
                scales=scales,
                zeros=zeros.to(torch.uint8),
                inputs=module.in_features,
                group=GROUP,
            )
        if method == "awq":
            for name, parameter in layer.named_parameters():
                if parameter.dim() == 1:  # norms and biases
                    found.parameters[f"model.layers.{index}.{name}"] = parameter.clone()
        states = [layer(each, **given[place]) for place, each in enumerate(states)]
    return found


@dataclass(slots=True)
class _Moments:
    """Of a matrix's inputs: the sum of their outer products [K, K], and of their sizes [K]; both of `count` tokens."""

    squares: Tensor
    sizes: Tensor
    count: int = 0


def _inputs(model: Any, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Mapping[str, Any]]]]:
    """The states that the first layer is called with, for each batch; and all else that each is, as its own mask."""
    layers = model.get_decoder().layers
    states: list[Tensor] = []
    given: list[list[Mapping[str, Any]]] = [[] for _ in layers]

    def keep(index: int, places: tuple[Any, ...], named: dict[str, Any]) -> None:
        if index == 0:
            states.append(places[0])
        own = {name: value for name, value in named.items() if name not in ("past_key_values", "use_cache")}
        given[index].append(own)

    hooks = [
        layer.register_forward_pre_hook(lambda _module, *called, index=index: keep(index, *called), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        for ids in batches:
            model.get_decoder()(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states, given


def _moments(
    layer: nn.Module, linears: Mapping[str, nn.Linear], states: Sequence[Tensor], given: Sequence[Mapping[str, Any]]
) -> dict[str, _Moments]:
    found: dict[str, _Moments] = {}
    hooks = []
    for name, module in linears.items():
        width = module.in_features
        own = found[name] = _Moments(torch.zeros(width, width), torch.zeros(width))

        def add(_module: nn.Module, places: tuple[Any, ...], own: _Moments = own) -> None:
            rows = places[0].flatten(0, -2).float()
            own.squares += rows.T @ rows
            own.sizes += rows.abs().sum(dim=0)
            own.count += len(rows)

        hooks.append(module.register_forward_pre_hook(add))
    try:
        for place, each in enumerate(states):
            layer(each, **given[place])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _ends(part: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, rounded to float16, and zeros of groups [O, ..., GROUP]: their ends become codes, and zero is one."""
    low, high = part.amin(dim=-1).clamp_max(0.0), part.amax(dim=-1).clamp_min(0.0)
    scales = ((high - low) / _TOP).clamp_min(2.0**-24).half().float()
    return scales, (-low / scales).round().clamp(0, _TOP)


def _nearest(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [O, K], scales and zeros [O, K / GROUP]."""
    groups = matrix.view(len(matrix), -1, GROUP)
    scales, zeros = _ends(groups)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, _TOP)
    return codes.view_as(matrix), scales.half(), zeros


def _numbers(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = codes.view(len(codes), -1, GROUP)
    return ((groups - zeros[..., None]) * scales.float()[..., None]).view_as(codes)


def _by_gptq(matrix: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_nearest`. Inputs that are always zero cost nothing."""
    rest, curvature = matrix.double().clone(), squares.double().clone()
    diagonal = curvature.diagonal()
    diagonal += torch.where(diagonal == 0, 1.0, 0.0) + _DAMPING * diagonal.mean()
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(curvature)), upper=True)
    codes = torch.empty_like(matrix)
    scales, zeros = (torch.empty(len(matrix), matrix.shape[1] // GROUP) for _ in range(2))
    for begin in range(0, matrix.shape[1], _AT_ONCE):
        end = min(begin + _AT_ONCE, matrix.shape[1])
        missed = torch.zeros(len(matrix), end - begin, dtype=torch.float64)
        for place in range(begin, end):
            group = place // GROUP
            if place % GROUP == 0:
                scales[:, group], zeros[:, group] = _ends(rest[:, place : place + GROUP].float())
            scale, zero = scales[:, group].double(), zeros[:, group].double()
            codes[:, place] = (rest[:, place] / scale + zero).round().clamp(0, _TOP)
            missed[:, place - begin] = (rest[:, place] - (codes[:, place] - zero) * scale) / upper[place, place]
            rest[:, place:end] -= missed[:, place - begin, None] * upper[place, place:end]
        rest[:, end:] -= missed @ upper[begin:end, end:]
    return codes, scales.half(), zeros


def _fold_checked(
    layer: nn.Module,
    linears: Mapping[str, nn.Linear],
    moments: Mapping[str, _Moments],
    states: Tensor,
    given: Mapping[str, Any],
) -> None:
    """`_fold`. Raises ValueError if the layer's outputs are others then: a module of that name does something else."""
    before = layer(states, **given)
    _fold(layer, linears, moments)
    differs = float((layer(states, **given) - before).abs().max() / before.abs().max())
    if not differs < _MOST_FOLDED:
        raise ValueError(
            f"AWQ is for layers of the Llama kind; folding changes the outputs of this one by {differs:.2g}"
        )


def _fold(layer: nn.Module, linears: Mapping[str, nn.Linear], moments: Mapping[str, _Moments]) -> None:
    """Scale inputs up, and what makes them down: no output changes before matrices are rounded."""
    for maker_name, names in _FOLDS:
        try:
            maker, own = layer.get_submodule(maker_name), [linears[name] for name in names]
        except (AttributeError, KeyError) as missing:
            raise ValueError(f"AWQ is for layers of the Llama kind; one has no {missing}") from None
        numbers = maker.weight
        assert isinstance(numbers, Tensor)
        scales = _best_scales([module.weight.float() for module in own], moments[names[0]])
        for module in own:
            module.weight.mul_(scales)
        # Of a norm a factor of each channel, of a product its rows.
        numbers.div_(scales if numbers.dim() == 1 else scales[:, None])
        if (bias := getattr(maker, "bias", None)) is not None:
            bias.div_(scales)


def _best_scales(matrices: Sequence[Tensor], moments: _Moments) -> Tensor:
    """Of each input: of the powers of its mean size the one whose rounded matrices change their outputs least."""
    mean = (moments.sizes / max(moments.count, 1)).clamp_min(1e-8)
    best, least = torch.ones_like(mean), float("inf")
    for step in range(_POWERS):
        scales = mean ** (step / _POWERS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        cost = 0.0
        for matrix in matrices:
            missed = _numbers(*_nearest(matrix * scales)) / scales - matrix
            cost += float(((missed @ moments.squares) * missed).sum())
        if cost < least:
            best, least = scales, cost
    return best
