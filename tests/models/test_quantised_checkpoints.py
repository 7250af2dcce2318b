"""Checkpoints in each quantised layout that is read, written here by another way than they are read; and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.compose import executor, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, ModelError
from inference_engine.models.folder import CONFIG
from inference_engine.models.quantised_linear import QuantisedLinear
from tests.laws.variants import generate, text
from tests.tiny import SMALL, tiny_model

pytestmark = pytest.mark.usefixtures("admitting_once")

Tensors = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32


def in_fp8(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and the numbers that they stand for; scales of the shape of the weight."""
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scales


def by_channel(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes, numbers = in_fp8(weight, scales.float().expand_as(weight))
    return {f"{stem}.weight": codes, f"{stem}.weight_scale": scales, f"{stem}.input_scale": torch.ones(1)}, numbers


def by_matrix(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    codes, numbers = in_fp8(weight, scale.expand_as(weight))
    return {f"{stem}.weight": codes, f"{stem}.weight_scale": scale}, numbers


def by_block(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of 24 outputs and 32 inputs: the last ones of 64 outputs have fewer."""
    rows, columns = -(-weight.shape[0] // 24), -(-weight.shape[1] // 32)
    scales = torch.empty(rows, columns)
    whole = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = slice(24 * row, 24 * row + 24), slice(32 * column, 32 * column + 32)
            scales[row, column] = weight[place].abs().max() / 448
            whole[place] = scales[row, column]
    codes, numbers = in_fp8(weight, whole)
    return {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": scales}, numbers


def in_groups(weight: Tensor, group: int, *, least_zero: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [O, K], zeros and scales [O, groups], and the numbers: by loops, as the definition says."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = torch.empty(outputs, inputs, dtype=torch.int64)
    zeros, scales = torch.empty(outputs, groups, dtype=torch.int64), torch.empty(outputs, groups)
    numbers = torch.empty_like(weight)
    for number in range(groups):
        place = slice(group * number, group * number + group)
        part = weight[:, place]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        scales[:, number] = ((high - low) / 15).half().float()
        zeros[:, number] = (-low / scales[:, number]).round().clamp(least_zero, 15).long()
        step, zero = scales[:, number, None], zeros[:, number, None]
        codes[:, place] = (part / step + zero).round().clamp(0, 15).long()
        numbers[:, place] = (codes[:, place] - zero) * step
    return codes, zeros, scales, numbers


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes of the last dimension in a word of 32 bits: number `order[i]` of them at bit 4 · i."""
    eight = codes.view(*codes.shape[:-1], -1, 8)
    whole = sum(eight[..., number] << (4 * place) for place, number in enumerate(order))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32).contiguous()


def in_gptq(stem: str, weight: Tensor, *, group: int = GROUP, offset: int = 1) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, numbers = in_groups(weight, group, least_zero=offset)
    return {
        f"{stem}.qweight": words(codes).T.contiguous(),  # packed along the inputs
        f"{stem}.qzeros": words((zeros - offset).T.contiguous()),
        f"{stem}.scales": scales.T.half().contiguous(),
        f"{stem}.g_idx": (torch.arange(weight.shape[1]) // group).to(torch.int32),
    }, numbers


def in_gptq_v2(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    return in_gptq(stem, weight, offset=0)


def in_gptq_whole(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    return in_gptq(stem, weight, group=weight.shape[1])


def in_awq(stem: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, numbers = in_groups(weight, GROUP, least_zero=0)
    return {
        f"{stem}.qweight": words(codes.T.contiguous(), AWQ_ORDER),  # packed along the outputs
        f"{stem}.qzeros": words(zeros.T.contiguous(), AWQ_ORDER),
        f"{stem}.scales": scales.T.half().contiguous(),
    }, numbers


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 32]}
Written = Callable[[str, Tensor], tuple[Tensors, Tensor]]
LAYOUTS: dict[str, tuple[dict[str, Any], Written, str]] = {
    "compressed-tensors": (COMPRESSED, by_channel, "fp8"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, by_channel, "fp8"),
    "fp8, one scale": ({"quant_method": "fp8"}, by_matrix, "fp8"),
    "fp8, blocks": (BLOCKS, by_block, "fp8/32"),
    "gptq": (GPTQ, in_gptq, "int4/32"),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, in_gptq_v2, "int4/32"),
    "gptq, no groups": ({**GPTQ, "group_size": -1}, in_gptq_whole, "int4/128"),
    "awq": (AWQ, in_awq, "int4/32"),
}


def written(folder: Path, layout: str, model: PreTrainedModel | None = None) -> Any:
    """A folder in this layout; returns transformers' model with the same numbers. The head is not quantised."""
    config, write, _ = LAYOUTS[layout]
    model = model or tiny_model()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            own, numbers = write(name, tensors.pop(f"{name}.weight"))
            tensors |= own
            module.weight.data = numbers
    tensors["mtp.fc.weight"] = torch.ones(4)  # of layers that are not loaded
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=config)
    return model


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **changes}))


def settings(folder: Path, **more: Any) -> ModelConfig:
    return ModelConfig(model=str(folder), cache_dir=str(folder.parent / "cache"), device="cpu", threads=1, **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_checkpoint_gives_the_logits_of_its_numbers(layout: str, tmp_path: Path) -> None:
    own = written(tmp_path / "model", layout)
    history = text(60)
    config = settings(tmp_path / "model")
    forward = open_backend(config)
    assert isinstance(forward, TorchForward)
    model = forward.seam.model

    for name, module in own.named_modules():
        if isinstance(module, nn.Linear):
            found = model.get_submodule(name)
            assert isinstance(found, QuantisedLinear) == (name != "lm_head"), name
            if isinstance(found, QuantisedLinear):
                assert torch.equal(found.matrix.unpacked(torch.float32), module.weight), name
    assert forward.facts.numerics == f"torch, {LAYOUTS[layout][2]} weights"
    assert executor(config)[0] == "torch"
    output = own.generate(torch.tensor([history]), max_new_tokens=12, do_sample=False)
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, history)
        assert [token for token, _ in generate(engine, session, 12)] == output[0, len(history) :].tolist()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"bits": 4}, "quant_method is None"),
        ("../other", "the layout is not known"),
        ({**GPTQ, "bits": 8}, "gptq with 8 bits"),
        ({**GPTQ, "group_size": 100}, "groups of 100"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**BLOCKS, "fmt": "e5m2"}, "e5m2"),
        ({**BLOCKS, "weight_block_size": [128, 96]}, r"\[128, 96\]"),
        ({**COMPRESSED, "format": "pack-quantized"}, "pack-quantized"),
        ({**COMPRESSED, "config_groups": {}}, "one group"),
    ],
    ids=str,
)
def test_a_layout_that_is_not_read_is_refused_by_its_configuration(config: Any, said: str, tmp_path: Path) -> None:
    written(tmp_path / "model", "gptq")
    edit(tmp_path / "model", quantization_config=config)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing that could be read")

    with pytest.raises(ModelError, match=rf"quantization_config: .*{said}.*quantised checkpoints are not supported"):
        open_backend(settings(tmp_path / "model"))


def change(folder: Path, name: str, made: Callable[[Tensor], Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    found = made(tensors.pop(name))
    if found is not None:
        tensors[name] = found
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("layout", "name", "made", "said"),
    [
        ("gptq", f"{UP}.g_idx", lambda found: found.flip(0), "order of their own"),
        ("gptq", f"{UP}.qzeros", lambda _: None, "no tensor .*qzeros"),
        ("gptq", f"{UP}.qweight", lambda found: found[:-1].contiguous(), "do not fit"),
        ("awq", f"{UP}.scales", lambda found: found.int(), "I32"),
        ("compressed-tensors", f"{UP}.weight_scale", lambda found: found[:-1].contiguous(), "each of 96 outputs"),
        ("fp8, blocks", f"{UP}.weight_scale_inv", lambda found: found[:, :-1].contiguous(), "do not fit"),
        ("fp8, blocks", f"{UP}.weight", lambda found: torch.full_like(found.float(), torch.nan).to(found.dtype), "NaN"),
        ("fp8, blocks", "model.norm.weight", lambda found: found.to(torch.float8_e4m3fn), "F8_E4M3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_their_layout_are_refused(
    layout: str, name: str, made: Callable[[Tensor], Tensor | None], said: str, tmp_path: Path
) -> None:
    written(tmp_path / "model", layout)
    change(tmp_path / "model", name, made)
    with pytest.raises(ModelError, match=said):
        open_backend(settings(tmp_path / "model"))
    # Numbers apart, doctor says it before anything is read.
    assert said == "NaN" or re.search(said, executor(settings(tmp_path / "model"))[1])


def test_weights_that_are_stored_quantised_are_not_made_into_another_format(tmp_path: Path) -> None:
    written(tmp_path / "model", "awq")
    with pytest.raises(BackendError, match=r"weights=int8.*weights=auto"):
        open_backend(settings(tmp_path / "model", weights="int8"))
    with pytest.raises(BackendError, match=r"backend=native .* stored in awq"):
        open_backend(settings(tmp_path / "model", backend="native"))
