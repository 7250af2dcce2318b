"""A loaded model is the saved one: same logits, weights mapped and tied, nothing asked of a network."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_engine.config import child_environment
from inference_engine.errors import BackendError, ModelError
from inference_engine.models import load_model
from tests.models.tiny_folder import POSITIONS, logits, tiny_llama


def test_the_loaded_model_gives_the_logits_of_the_saved_one(folder: Path, cache: Path) -> None:
    loaded = load_model(str(folder), cache=cache)
    assert torch.equal(logits(loaded.model), logits(tiny_llama()))
    assert (loaded.trained_positions, loaded.vocab_size) == (POSITIONS, 96)
    assert (loaded.dtype, loaded.device, loaded.weights_sha256) == ("float32", "cpu", None)


def test_tied_weights_stay_one_tensor(folder: Path, cache: Path) -> None:
    model: Any = load_model(str(folder), cache=cache).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's own memory map from /proc")
def test_float32_weights_are_pages_of_the_file(tmp_path: Path, cache: Path) -> None:
    # Larger than what an allocator would serve from a heap, so that addresses cannot coincide.
    tiny_llama(vocab_size=40_000).save_pretrained(tmp_path / "wide")
    model: Any = load_model(str(tmp_path / "wide"), cache=cache).model
    address = model.model.embed_tokens.weight.data_ptr()
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [region[-1] for region in regions if _contains(region[0], address)]
    assert mapped == [str(tmp_path / "wide" / "model.safetensors")]


def test_bfloat16_is_the_rounded_model(folder: Path, cache: Path) -> None:
    model = load_model(str(folder), cache=cache, dtype="bfloat16").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    rounded = dict(model.named_parameters())
    for name, exact in tiny_llama().named_parameters():
        assert torch.equal(rounded[name], exact.to(torch.bfloat16))


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_by_name(folder: Path, cache: Path, device: str) -> None:
    with pytest.raises(BackendError, match=device):
        load_model(str(folder), cache=cache, device=device)


def test_a_known_model_that_was_not_fetched_says_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(ModelError, match="kakeya models fetch smollm2-135m"):
        load_model("smollm2-135m", cache=cache)


def test_without_a_place_for_temporary_files_the_refusal_says_so(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "nowhere"))
    with pytest.raises(ModelError, match="TMPDIR"):
        load_model(str(folder), cache=cache)


def test_loading_opens_no_connection(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection to {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_model(str(folder), cache=cache)


def test_looking_at_models_does_not_import_torch() -> None:
    program = "import sys, inference_engine.models, inference_engine.cli.models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=child_environment())


def _contains(region: str, address: int) -> bool:
    start, end = (int(part, 16) for part in region.split("-"))
    return start <= address < end
