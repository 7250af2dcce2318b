"""Measured importances are those of the model: checked against its own loss, perturbed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laboratory.training.sensitivity import measure_sensitivity
from tests.further import further
from tests.kv_cache_proposer.small_models import HEADS, gemma3, llama, qwen3, tokens

Make = Callable[[], PreTrainedModel]

SINK, WINDOW = 2, 5
# 400 draws of a label, and what an error of this size costs beyond its square.
SAMPLING = 0.3
MODELS = pytest.mark.parametrize("make", [llama, qwen3, gemma3])


def log_probabilities(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        scores: Tensor = model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
    return scores


@MODELS
def test_the_model_comes_back_as_it_was(make: Make) -> None:
    model = make()
    ids = tokens(1, 20)
    before = log_probabilities(model, ids)
    measure_sensitivity(model, [ids], layers=[1, 2], sink=SINK, window=WINDOW)
    assert torch.equal(log_probabilities(model, ids), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@MODELS
def test_importances_are_symmetric_not_negative_and_the_same_again(make: Make) -> None:
    model = make()
    batches = [tokens(3, 21), tokens(2, 33, seed=1)]
    first, again, other = (
        measure_sensitivity(model, batches, layers=[1, 2], sink=SINK, window=WINDOW, seed=seed) for seed in (0, 0, 1)
    )
    for layer in (1, 2):
        assert first[layer].shape == (2, HEADS, 8, 8)
        assert torch.equal(first[layer], first[layer].transpose(-1, -2))
        assert float(torch.linalg.eigvalsh(first[layer]).min()) > -1e-6 * float(first[layer].abs().max())
        assert torch.equal(first[layer], again[layer])
        assert not torch.equal(first[layer], other[layer])


@pytest.mark.parametrize(
    ("make", "projection", "part"),
    [(llama, "k_proj", 0), (qwen3, "v_proj", 1), further(gemma3, "v_proj", 1)],
)
def test_importances_predict_what_an_error_costs(make: Make, projection: str, part: int) -> None:
    """The last position alone sees one entry as restored. In the last layer, an error δ in that entry can be put into
    what the projection gives, and KL at the last position is then δᵀ M δ / 2.
    """
    model = make()
    ids = tokens(1, SINK + WINDOW + 1, seed=3)
    draws = ids.expand(400, -1)
    importance = measure_sensitivity(model, [draws], layers=[2], sink=SINK, window=WINDOW)[2][part]
    exact = log_probabilities(model, ids)[0, -1]
    for head in range(HEADS):
        error = torch.zeros(HEADS, 8)
        error[head] = 0.05 * torch.randn(8, generator=torch.Generator().manual_seed(head))
        handle = getattr(model.model.layers[2].self_attn, projection).register_forward_hook(adding(error))
        erring = log_probabilities(model, ids)[0, -1]
        handle.remove()
        reported = float(error[head].double() @ importance[head] @ error[head].double()) / 2
        assert reported == pytest.approx(float((exact.exp() * (exact - erring)).sum()), rel=SAMPLING)


def adding(error: Tensor) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, SINK] += error.flatten()
        return output

    return hook
