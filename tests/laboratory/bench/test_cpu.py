"""What `kakeya bench cpu` makes of its samples, without the contenders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_engine.models import load_model
from laboratory.bench.cpu import (
    FILE,
    INT8,
    Contender,
    Found,
    add_arguments,
    measure,
    tables_of,
    values_of,
    works,
)
from laboratory.bench.cpu_contenders import Contender as Running
from laboratory.bench.made_models import CHOSEN, EXPERTS, write_hybrid, write_mixture
from tests.models.tiny_folder import logits


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def contender(name: str, kind: str, **options: Any) -> Contender:
    return Contender(name=name, python="python", kind=kind, arguments={}, **options)


def test_ratios_are_taken_within_a_round_and_come_before_what_is_absolute() -> None:
    found = Found()
    found.rounds[2, "decode at 128", INT8] = [6.0, 60.0]
    found.rounds[2, "decode at 128", FILE] = [12.0, 120.0]
    found.memory[2, INT8] = {"resident": 300.0}
    contenders = [contender(INT8, "ours", beside=(FILE,)), contender(FILE, "llama")]
    values = values_of(found, contenders)
    ratio = f"decode at 128, {INT8} ÷ {FILE}, 2 threads"
    assert next(iter(values)) == ratio
    assert values[ratio] == {"unit": "ratio", "median": 0.5, "low": 0.5, "high": 0.5, "count": 2}
    assert values[f"decode at 128, {INT8}, 2 threads"]["median"] == 33.0
    assert tables_of(found, contenders) == {"2 threads": [{"ms": "decode at 128", INT8: 33.0, FILE: 66.0}]}


def test_everyone_takes_turns_at_each_kind_of_work() -> None:
    asked = []

    class Process:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, request: str, **arguments: Any) -> list[float] | float:
            asked.append((self.name, request))
            return [1.0, 2.0, 9.0] if request == "decode" else 5.0

    work = {
        name: works(contender(name, "ours", is_together=False), (128,), is_first=False, has_time=True) for name in "ab"
    }
    processes: Any = {name: Process(name) for name in "ab"}
    found = list(measure(processes, work, 1))
    assert found[:2] == [("decode at 128", "b", 2.0), ("decode at 128", "a", 2.0)]
    assert found[2:] == [(name, one, 5.0) for name in ("append of 18", "prefill of 512") for one in "ba"]
    assert asked[2:5] == [("b", "first_id")] * 3, "an append is short: a round has three"


class Scripted(Running):
    """Logits that are known."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    def decode(self, length: int, count: int) -> list[float]:
        return []

    def first_id(self, count: int) -> float:
        return 0.0

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self._logits[: len(token_ids) - 1]


def test_divergence_is_that_of_the_distributions(tmp_path: Path) -> None:
    texts, file = [[0, 1, 1], [1, 0]], str(tmp_path / "logits.npy")
    even, uneven = np.zeros((2, 2), np.float32), np.log(np.array([[0.25, 0.75]] * 2, np.float32))
    assert Scripted(even).write_logits(texts, file) == 3
    same = Scripted(even + 7).divergence(texts, file)
    assert same == {"kl": pytest.approx(0, abs=1e-12), "same": 1.0, "loss": pytest.approx(0, abs=1e-12)}
    other = Scripted(uneven).divergence(texts, file)
    assert other["kl"] == pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75))
    assert other["same"] == 0.0
    assert other["loss"] == pytest.approx(np.log(0.5) - np.log([0.75, 0.75, 0.25]).mean())


def test_a_made_mixture_is_a_model_whose_numbers_stay_small(tmp_path: Path) -> None:
    write_mixture(tmp_path / "made.gguf", layers=2, hidden=64, vocabulary=96)
    model: Any = load_model(str(tmp_path / "made.gguf"), cache=tmp_path / "cache").model
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (EXPERTS, CHOSEN)
    assert 0.1 < float(logits(model).abs().mean()) < 10


def test_a_made_hybrid_is_a_model_whose_numbers_stay_small(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "made.gguf", layers=4, hidden=64, vocabulary=96)
    model: Any = load_model(str(tmp_path / "made.gguf"), cache=tmp_path / "cache").model
    assert model.config.layer_types == [*["linear_attention"] * 3, "full_attention"]
    assert model.config.rope_parameters["rope_theta"] == 1e7
    assert 0.1 < float(logits(model).abs().mean()) < 10
