"""What `make bench-cpu` makes of its samples, without the contenders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from scripts.bench_cpu import (
    FILE,
    INT8,
    LENGTHS,
    Contender,
    Found,
    contenders_of_files,
    measure,
    parse,
    said_of_files,
    tables_of,
    values_of,
    works,
)
from scripts.cpu_contenders import Contender as Running
from scripts.cpu_contenders import steps
from tests.models.tiny_gguf import tiny_model, write_gguf


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


def test_slow_contenders_are_spared_long_histories_when_there_is_no_time() -> None:
    slow = contender("slow", "ours", is_slow=True)
    names = [one.name for one in works(slow, LENGTHS, is_first=False, has_time=False)]
    assert "decode at 1024" in names
    assert "decode at 4096" not in names
    assert "decode at 4096" in [one.name for one in works(slow, LENGTHS, is_first=False, has_time=True)]


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


def test_steps_are_between_ids() -> None:
    assert steps([1.0, 1.5, 1.75]) == [500.0, 250.0]


def test_a_named_file_is_beside_torch_and_llama_on_it_and_beside_the_first_one(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.gguf" for name in "ab"]
    for file in files:
        write_gguf(tiny_model("llama"), file, "Q8_0")
    args = parse(["--llama", "python", "--files", *map(str, files)])
    beside = {each.name: each.beside for each in contenders_of_files(args)}
    assert beside["kakeya exact a"] == ("kakeya torch a", "llama.cpp a")
    assert beside["kakeya exact b"] == ("kakeya torch b", "llama.cpp b", "kakeya exact a")
    args.llama = "none"
    names = [each.name for each in contenders_of_files(args)]
    assert names == ["kakeya exact a", "kakeya torch a", "kakeya exact b", "kakeya torch b"]
    said = said_of_files(args, Found())["config"]
    assert said["llama.cpp"] == "not measured" and said["files"]["a"].startswith("Q8_0 ")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rounds", "0"],
        ["--rounds", "17"],
        ["--threads", "0"],
        ["--lengths", "100"],
        ["--llama", "none"],
        ["--files", "not-there.gguf"],
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
