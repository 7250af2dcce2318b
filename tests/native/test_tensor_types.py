"""A GGUF file runs natively whatever types its tensors have, with the logits that torch gives of the same file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.native.forward import NativeForward
from inference_engine.compose import executor, open_backend
from inference_engine.config import ModelConfig
from inference_engine.kv.strategies.full import Full
from inference_engine.models.encodings import BY_NAME
from inference_engine.models.gguf_header import read_gguf
from tests.further import FURTHER
from tests.models.test_models_command import kakeya_models
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.native.test_forward import Sessions, ids_of
from tests.tiny_native import library

# Inputs of every matrix, so that a row is whole blocks of any type.
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "initializer_range": 0.08}
BLOCKS = [name for name, kind in BY_NAME.items() if not kind.is_float]
# As llama.cpp mixes them: in one file, by matrix. The first one is that of the embedding, which is the head, too.
TYPES = sorted(BY_NAME, key=lambda name: name != "IQ4_XS")
# Logits of a few units; both executors multiply in float32.
ROUNDING = 2e-3


@pytest.fixture(autouse=True)
def _has_library() -> None:
    library()


def settings_of(path: Path, backend: str = "auto") -> ModelConfig:
    cache = str(path.parent / "cache")
    return ModelConfig(model=str(path), cache_dir=cache, backend=backend, kv_dtype="float32", threads=2)


def logits_of(path: Path, backend: str) -> Tensor:
    forward = open_backend(settings_of(path, backend))
    assert forward.facts.backend == backend
    return Sessions(forward, Full()).logits(0, ids_of(24), [8, 16, 17])


def check_both_give_the_same(path: Path) -> None:
    ours, torchs = logits_of(path, "native"), logits_of(path, "torch")
    assert torchs.abs().max() > 1, "nothing would be compared"
    torch.testing.assert_close(ours, torchs, atol=ROUNDING * float(torchs.abs().max()), rtol=0)


def by_turns(types: Sequence[str]) -> Callable[[str], str]:
    """Every matrix another type, the norms and biases F32."""
    given: dict[str, str] = {}
    return lambda name: given.setdefault(name, types[len(given) % len(types)])


def write(path: Path, encoding: str | Callable[[str], str], **changes: int) -> Path:
    write_gguf(tiny_model("llama", **WIDE, **changes), path, encoding)
    return path


@pytest.mark.usefixtures("trying_no_strategies")
def test_a_file_that_has_every_type_runs_natively_with_the_logits_of_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "model.gguf", by_turns(TYPES), num_hidden_layers=4)
    assert {tensor.encoding.name for tensor in read_gguf(path).tensors.values()} == set(TYPES)
    with caplog.at_level(logging.WARNING):
        check_both_give_the_same(path)

    tensors = read_gguf(path).tensors.values()
    said = [record.message for record in caplog.records if "MB of memory" in record.message]
    assert len(said) == 2, "each executor says once what memory it takes"
    for message, number_bytes, made in (
        (said[0], 1.25, [tensor for tensor in tensors if tensor.encoding.levels]),
        (said[1], 4, [tensor for tensor in tensors if not tensor.encoding.is_float]),
    ):
        assert {tensor.encoding.name for tensor in made} == set(message.replace(",", " ").split()) & set(TYPES)
        assert f"{number_bytes * sum(math.prod(tensor.shape) for tensor in made) / 1e6:.1f} MB of memory" in message

    assert executor(settings_of(path))[0] == "native"
    assert kakeya_models("show", str(path), "--cache-dir", str(tmp_path / "cache")) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "in MXFP4" in shown and "are held as bytes" in shown


@pytest.mark.parametrize("encoding", [pytest.param(name, marks=FURTHER) for name in BLOCKS])
@pytest.mark.usefixtures("trying_no_strategies")
def test_a_file_of_one_type_runs_natively_with_the_logits_of_torch(encoding: str, tmp_path: Path) -> None:
    check_both_give_the_same(write(tmp_path / "model.gguf", encoding))


@pytest.mark.usefixtures("trying_no_strategies")
def test_one_odd_matrix_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    odd = {"blk.1.ffn_down.weight": "IQ3_S", "blk.0.attn_v.weight": "Q5_K"}
    path = write(tmp_path / "model.gguf", lambda name: odd.get(name, "Q4_0"))
    forward = open_backend(settings_of(path))
    assert forward.facts.backend == "native"
    assert forward.facts.weights == ("int4", "int8_pair", "q5_k")


@pytest.mark.usefixtures("trying_no_strategies")
def test_compact_weights_take_at_most_two_fifths_more_than_their_file(tmp_path: Path) -> None:
    types = ("Q5_0", "Q5_1", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q8_0", "Q4_1")
    path = write(tmp_path / "model.gguf", by_turns(types))
    stored = sum(tensor.size_bytes for tensor in read_gguf(path).tensors.values())
    forward = open_backend(settings_of(path, "native"))
    assert isinstance(forward, NativeForward)
    assert forward.program.weight_bytes <= 1.4 * stored + np.prod((16, 256)) * 4
