"""Codes of 4 bits that are chosen by outputs: what is served is what was chosen, and it costs outputs less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedModel,
)

from laboratory.evaluation import quantising
from laboratory.evaluation.quantising import METHODS, quantise_model
from tests.tiny import VOCABULARY, tiny_model


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "GROUP", 32)


def batches() -> list[Tensor]:
    return list(torch.randint(0, VOCABULARY, (6, 1, 40), generator=torch.Generator().manual_seed(1)))


def uneven_model() -> PreTrainedModel:
    """Some channels of what norms give are far larger than others, as in trained models. One layer has a window."""
    model = tiny_model()
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
    states, given = quantising._inputs(exact, batches())
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    moments = quantising._moments(layer, linears, states, given[0])

    missed = dict.fromkeys(METHODS, 0.0)
    for name, module in linears.items():
        squares, matrix = moments[name].squares, module.weight.detach()
        scales = quantising._best_scales([matrix], moments[name])
        made = {
            "nearest": quantising._numbers(*quantising._nearest(matrix)),
            "gptq": quantising._numbers(*quantising._by_gptq(matrix, squares)),
            "awq": quantising._numbers(*quantising._nearest(matrix * scales)) / scales,
        }
        for method, numbers in made.items():
            missed[method] += float((((numbers - matrix) @ squares) * (numbers - matrix)).sum())

    assert missed["gptq"] < 0.7 * missed["nearest"]
    assert missed["awq"] < 0.9 * missed["nearest"]


@torch.no_grad()
def test_folded_scales_change_no_output_before_matrices_are_rounded() -> None:
    model, whole = uneven_model(), uneven_model()
    layer = model.get_decoder().layers[0]
    states, given = quantising._inputs(model, batches())
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}

    quantising._fold(layer, linears, quantising._moments(layer, linears, states, given[0]))

    assert not torch.equal(linears["mlp.down_proj"].weight, whole.get_decoder().layers[0].mlp.down_proj.weight)
    torch.testing.assert_close(logits(model), logits(whole), atol=1e-3, rtol=1e-3)


def test_a_family_whose_modules_of_these_names_do_something_else_is_refused() -> None:
    """A norm of Gemma multiplies by one more than its weight."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma2Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **sizes)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="folding changes the outputs of this one by"):
        quantise_model(Gemma2ForCausalLM(config).eval(), batches(), "awq")
