"""What a checkpoint reads is the model's own weights, whatever file they are in; a damaged file is a ModelError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from inference_engine.errors import ModelError
from inference_engine.models.checkpoint import Checkpoint, GgufCheckpoint
from inference_engine.models.gguf_config import gguf_config
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.open_checkpoint import open_checkpoint
from tests.models.tiny_gguf import FAMILIES, tiny_model, write_gguf


def weights_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The model's parameters, each expert under a name of its own."""
    found = {}
    for name, parameter in model.state_dict().items():
        tensor = parameter.float().numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." not in name:
            found[name] = tensor
            continue
        layer = name.rpartition(".")[0]
        for expert, part in enumerate(tensor):
            if name.endswith("down_proj"):
                found[f"{layer}.{expert}.down_proj.weight"] = part
            else:
                found[f"{layer}.{expert}.gate_proj.weight"], found[f"{layer}.{expert}.up_proj.weight"] = np.split(
                    part, 2
                )
    return found


def check_equal(checkpoint: Checkpoint, expected: dict[str, np.ndarray[Any, Any]], atol: float = 0.0) -> None:
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        read = checkpoint.tensor(name, tensor.shape).as_float32()
        np.testing.assert_allclose(read, tensor, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_reads_back_as_the_models_own_weights(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(model, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    # Gemma's norms lose their last bits when one is added.
    check_equal(checkpoint, weights_of(model), atol=2e-7 if family.startswith("gemma") else 0.0)
    assert "lm_head.weight" in checkpoint or model.config.tie_word_embeddings
    assert "rope_freqs.weight" not in checkpoint


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_stay_as_they_are_and_their_rows_are_named(encoding: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(model, tmp_path / "model.gguf", encoding)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    kind = GGMLQuantizationType[encoding]
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        own = model.state_dict()[f"model.layers.1.{name}.weight"].numpy()
        stored = checkpoint.tensor(f"model.layers.1.{name}.weight")
        assert (stored.encoding, stored.shape) == (encoding, own.shape)
        assert not stored.data.flags.writeable
        assert not stored.data.flags.owndata
        by_row = stored.data.reshape(own.shape[0], -1)
        rows = by_row if stored.row_order is None else by_row[stored.row_order]
        np.testing.assert_array_equal(rows, quantize(own, kind).view(np.uint8).reshape(rows.shape))
        np.testing.assert_array_equal(stored.as_float32(), dequantize(quantize(own, kind), kind))
        assert (stored.row_order is not None) == ("self_attn" in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_is_the_models_own(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    write_gguf(model, tmp_path / "model.gguf")
    content = gguf_config(read_gguf(tmp_path / "model.gguf"))
    read = {name: (value, getattr(model.config, name, None)) for name, value in content.items()}
    differing = {name: pair for name, pair in read.items() if pair[0] != pair[1]}
    assert {name: pair for name, pair in differing.items() if name not in ("architectures", "head_dim")} == {}
    assert content["head_dim"] == getattr(model.config, "head_dim", None) or 16


def test_rotation_scaled_as_in_llama_3_is_recovered_from_its_factors(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = tiny_model("llama")
    model.config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 500_000.0 ** (-torch.arange(0, 16, 2) / 16)
    path = tmp_path / "model.gguf"
    for factors in (plain / scaled, torch.ones(8) * 2):
        write_gguf(model, path, factors=factors.numpy())
        if factors[0] == 2:
            with pytest.raises(ModelError, match=r"rope_freqs\.weight is not what Llama 3"):
                gguf_config(read_gguf(path))
        else:
            assert gguf_config(read_gguf(path))["rope_parameters"] == model.config.rope_parameters
            assert "rope_freqs.weight" not in GgufCheckpoint(read_gguf(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_and_their_shards_read_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model("qwen2").to(dtype)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for folder in ("one", "shards"):
        checkpoint = open_checkpoint(tmp_path / folder)
        check_equal(checkpoint, weights_of(model))
        stored = checkpoint.tensor("model.norm.weight")
        assert stored.encoding == {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[str(dtype)[6:]]
        assert not stored.data.flags.owndata


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int8), "b": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors: a is stored as I8; F32, F16, BF16 can be read"):
        checkpoint.tensor("a")
    with pytest.raises(ModelError, match="no tensor c"):
        checkpoint.tensor("c")
    with pytest.raises(ModelError, match=r"b has the shape \(2, 3\), the configuration asks for \(3, 2\)"):
        checkpoint.tensor("b", (3, 2))


def test_a_damaged_safetensors_header_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for spoilt in (
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": "ab"},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0, 8, 9]},
        {"data_offsets": None},
        {"dtype": 3},
    ):
        with subtests.test(str(spoilt)):
            whole = {"whole": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
            header = json.dumps(
                {**whole, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **spoilt}}
            ).encode()
            (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
            with pytest.raises(ModelError, match=r"model\.safetensors"):
                open_checkpoint(tmp_path).tensor("a")
