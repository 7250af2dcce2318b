"""Codes of 4 bits that are chosen by outputs: what is served is what was chosen, and it costs outputs less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from laboratory.evaluation import quantising
from laboratory.evaluation.quantising import METHODS, quantise_model
from tests.tiny import VOCABULARY, tiny_model


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "GROUP", 32)


def batches() -> list[Tensor]:
    return list(torch.randint(0, VOCABULARY, (6, 1, 40), generator=torch.Generator().manual_seed(1)))


def uneven_model() -> PreTrainedModel:
    """Some channels of what norms give are far larger than others, as in trained models."""
    model = tiny_model(windowed=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter[::9] *= 12.0
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return torch.cat([model(ids).logits for ids in batches()])


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_the_matrices_gives_what_they_were_chosen_to_give(method: str) -> None:
    chosen_in, served = uneven_model(), uneven_model()

    found = quantise_model(chosen_in, batches(), method)
    found.put_into(served)

    assert len(found.matrices) == 3 * 7
    torch.testing.assert_close(logits(served), logits(chosen_in), atol=1e-4, rtol=1e-4)
    assert not torch.equal(logits(served), logits(uneven_model()))


@torch.no_grad()
def test_codes_that_are_chosen_by_outputs_cost_them_less_than_the_nearest_ones() -> None:
    """The outputs of the first layer's matrices over what the text gives them, summed: inputs are the same there."""
    exact = uneven_model()
    layer = exact.get_decoder().layers[0]
    states, given = quantising._inputs_of_first(exact, layer, batches())
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    moments = quantising._moments(layer, linears, states, given)

    missed = dict.fromkeys(METHODS, 0.0)
    for name, module in linears.items():
        squares, matrix = moments[name].squares, module.weight.detach()
        scales = quantising._best_scales([matrix], moments[name])
        made = {
            "nearest": quantising._numbers(*quantising._nearest(matrix, squares)),
            "gptq": quantising._numbers(*quantising._by_gptq(matrix, squares)),
            "awq": quantising._numbers(*quantising._nearest(matrix * scales, squares)) / scales,
        }
        for method, numbers in made.items():
            missed[method] += float((((numbers - matrix) @ squares) * (numbers - matrix)).sum())

    assert missed["gptq"] < 0.7 * missed["nearest"]
    assert missed["awq"] < 0.9 * missed["nearest"]


@torch.no_grad()
def test_folded_scales_change_no_output_before_matrices_are_rounded() -> None:
    model, whole = uneven_model(), uneven_model()
    layer = model.get_decoder().layers[0]
    states, given = quantising._inputs_of_first(model, layer, batches())
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}

    quantising._fold(layer, linears, quantising._moments(layer, linears, states, given))

    assert not torch.equal(linears["mlp.down_proj"].weight, whole.get_decoder().layers[0].mlp.down_proj.weight)
    torch.testing.assert_close(logits(model), logits(whole), atol=1e-3, rtol=1e-3)


def test_widths_and_families_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "_FOLDS", (("input_layernorm", ("self_attn.q_projection",)),))
    with pytest.raises(ValueError, match=r"one has no 'self_attn\.q_projection'"):
        quantise_model(uneven_model(), batches(), "awq")
    monkeypatch.setattr(quantising, "GROUP", 64)
    with pytest.raises(ValueError, match="down_proj has inputs that are no multiple of 64"):
        quantise_model(uneven_model(), batches(), "gptq")
