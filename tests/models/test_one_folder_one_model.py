"""One folder is one model: whatever runs it gives the logits that transformers gives, or refuses it by name."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_engine.backends.base import Forward
from inference_engine.compose import executor as executor_of
from inference_engine.compose import open_backend
from inference_engine.config import ModelConfig, has_mlx
from inference_engine.errors import BackendError, ModelError
from inference_engine.kv.strategies.full import Full
from inference_engine.models import check_model, find_model, remarks
from tests.further import further
from tests.models.odd_models import ALL, ODD, REPEATED, Odd
from tests.models.tiny_folder import PROMPT
from tests.native.test_forward import Sessions
from tests.tiny_native import library

pytestmark = pytest.mark.usefixtures("trying_no_strategies")

# Relative to the largest logit: other orders of sums, and K and V in float32.
EXACT = 2e-4
EXECUTORS = [name for name in ALL if name != "mlx" or has_mlx()]


def opened(path: Path, cache: Path, executor: str) -> Forward:
    if executor == "native":
        library()
    asked: dict[str, Any] = {"device": "mlx"} if executor == "mlx" else {"backend": executor}
    kv: dict[str, Any] = {"kv_dtype": "float32"} if executor == "native" else {}
    return open_backend(ModelConfig(model=str(path), cache_dir=str(cache), threads=1, **asked, **kv))


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(PROMPT).logits[0]
    return found


def reference(odd: Odd, folder: Path) -> torch.Tensor | None:
    """None for a folder that is refused by all."""
    made = odd.make(folder)
    if not odd.served_by:
        return None
    if made is None:
        made = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return logits_of(made)


def refusal_of(path: Path, cache: Path) -> str:
    try:
        check_model(str(path), cache=cache)
        name, reason = executor_of(ModelConfig(model=str(path), cache_dir=str(cache)))
    except ModelError as error:
        return str(error)
    return "" if name else reason


@pytest.mark.parametrize("name", [further(name) if name in REPEATED else name for name in ODD])
def test_every_executor_gives_the_logits_of_transformers_or_refuses_by_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd, folder = ODD[name], tmp_path / "model"
    expected = reference(odd, folder)
    path = folder / odd.name
    for executor in EXECUTORS:
        caplog.clear()
        if executor not in odd.served_by:
            with pytest.raises((BackendError, ModelError), match=odd.refusal):
                opened(path, tmp_path / "cache", executor)
            continue
        with caplog.at_level(logging.INFO):
            forward = opened(path, tmp_path / "cache", executor)
        assert forward.facts.backend == executor
        assert expected is not None
        found = Sessions(forward, Full()).logits(0, PROMPT[0].tolist(), [4])
        assert float((found - expected).abs().max() / expected.abs().max()) < EXACT, executor
        assert re.search(odd.note, caplog.text), f"the log of {executor}"
    # What doctor and `models show` say before anything is loaded: where none serves it, the same refusal.
    said = refusal_of(path, tmp_path / "cache")
    assert (re.search(odd.refusal, said) is not None and "no list" not in said) if not odd.served_by else not said
    if odd.note:
        assert re.search(odd.note, "\n".join(remarks(find_model(str(path), cache=tmp_path / "cache"))))
