"""A model whose norms were exchanged is the model that it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference_engine.models.norms import FusedNorm, fuse_norms
from tests.kv_cache_proposer.small_models import gemma3, llama, qwen3, tokens

DTYPES = [torch.float32, torch.bfloat16]
# Of errors against the same model in float64: other roundings, no more of them.
NO_WORSE = 1.2
MODELS = [(llama, 7, False), (qwen3, 13, False), (gemma3, 19, True)]


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(ids).logits.double()
    return found


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Norm")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("make", "count", "adds_one"), MODELS, ids=["llama", "qwen3", "gemma3"])
def test_every_norm_is_exchanged_and_logits_are_as_exact_as_they_were(
    make: type[PreTrainedModel], count: int, adds_one: bool, dtype: torch.dtype
) -> None:
    model = make().to(dtype)
    ids = tokens(2, 24)
    exact, before = (logits(one, ids) for one in (copy.deepcopy(model).double(), model))
    state = copy.deepcopy(model.state_dict())
    parameters = [id(parameter) for parameter in model.parameters()]
    assert len(norms(model)) == count
    assert fuse_norms(model) == count
    assert all(isinstance(norm, FusedNorm) for norm in norms(model))
    assert {norm._factor is not None for norm in norms(model)} == {adds_one}
    after = logits(model, ids)
    assert (after - exact).abs().mean() <= NO_WORSE * (before - exact).abs().mean()
    # A reader of the weights finds the same ones, in the same order.
    assert [*model.state_dict()] == [*state]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameters


class PlainRMSNorm(nn.Module):
    """As a model's own norm is; those below differ from it in one thing each."""

    def __init__(self, size: int = 48, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.added)
        return (self.factor * wide).to(states.dtype)

    @property
    def added(self) -> float:
        return self.eps

    @property
    def factor(self) -> Tensor:
        return self.weight.float()


class OtherEpsRMSNorm(PlainRMSNorm):
    @property
    def added(self) -> float:
        return 10 * self.eps


class OtherFactorRMSNorm(PlainRMSNorm):
    @property
    def factor(self) -> Tensor:
        return self.weight.float().exp()


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states - states.mean(-1, keepdim=True))


class CappedRMSNorm(PlainRMSNorm):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.clamp(-60, 60))


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(states) * (1 if gate is None else gate)


class WiderRMSNorm(PlainRMSNorm):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.double())


class WeightlessRMSNorm(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states


class ShiftedRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(48))


OTHERS = [
    OtherEpsRMSNorm,
    OtherFactorRMSNorm,
    CentredRMSNorm,
    CappedRMSNorm,
    GatedRMSNorm,
    WiderRMSNorm,
    WeightlessRMSNorm,
    ShiftedRMSNorm,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_a_norm_that_does_something_else_stays_beside_one_that_does_not(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    model = nn.ModuleDict({"other": kind(), "known": PlainRMSNorm()}).to(dtype)
    assert fuse_norms(model) == 1
    assert type(model["other"]) is kind
    assert isinstance(model["known"], FusedNorm)
