"""The laws of KV entries through MLX's attention: given keys and values, in a pool that MLX reads where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from torch import Tensor

from inference_engine.backends.mlx.bridge import as_mlx, as_torch
from inference_engine.backends.mlx.forward import _Together
from inference_engine.backends.mlx.operation_kernels import AttendCall
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.strategy import KVStrategy
from tests.further import off_metal, one_of_each
from tests.laws import test_session_kv_laws as laws
from tests.laws.variants import all_strategies, mechanism
from tests.mlx.test_laws import READS


@dataclass(frozen=True)
class Layers:
    """Of ModelSpec, what attention reads."""

    layers: tuple[LayerGeometry, ...] = laws.LAYERS


class MlxPlan(StepPlan):
    """Attends by MLX where MlxForward would."""

    pools: ClassVar[dict[int, mx.array]] = {}
    attended = 0

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **{**words, "ops": DeviceOps(attends_together=True)})

    def attend(self, layer: int, queries: Tensor, keys: Tensor | None, values: Tensor | None, **words: Any) -> Tensor:
        if not self.is_numbers_only or self.records:
            return super().attend(layer, queries, keys, values, **words)
        assert keys is not None and values is not None, "nothing has written them"
        MlxPlan.attended += 1
        together = _Together(self, Layers(), self.pools[self.pool.address])  # type: ignore[arg-type]
        out = together(
            AttendCall(layer, **words), *(as_mlx(states[0].transpose(0, 1)) for states in (queries, keys, values))
        )
        mx.eval(out, *together.written())
        together.write()
        return as_torch(out).view(1, out.shape[0], *queries.shape[1::2])


@pytest.fixture(autouse=True)
def _through_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(count: int) -> Tensor:
        memory = mx.zeros((count // 16, 16))
        mx.eval(memory)
        found = as_torch(memory).view(-1)
        MlxPlan.pools[found.data_ptr()] = memory
        return found

    monkeypatch.setattr(laws, "zeros", zeros)
    monkeypatch.setattr(laws, "StepPlan", MlxPlan)
    monkeypatch.setattr(MlxPlan, "pools", {})
    monkeypatch.setattr(MlxPlan, "attended", 0)


def each_mechanism_first(chunks: Iterator[int]) -> list[Any]:
    """Each strategy with one size of a step, in turn. Those of a mechanism that had its turn are further cases.

    Where every token chooses what it reads, all of it is read by views, which are torch's.
    """
    read_here = [each for each in all_strategies() if each.options().get("appended") != "select"]
    return one_of_each(zip(read_here, chunks, strict=False), lambda case: mechanism(case[0]))


def each_name_first(chunks: Iterator[int]) -> list[Any]:
    """Likewise; off Metal those of a strategy's name that had its turn are further cases, too."""
    names = set[str]()
    found = []
    for case in each_mechanism_first(chunks):
        is_further = type(case) is not tuple  # its mechanism had its turn
        name = "" if is_further else case[0].name
        found.append(off_metal(*case) if name in names else case)
        names.update([] if is_further else [name])
    return found


@pytest.mark.parametrize(("strategy", "chunk"), each_name_first(cycle((5, laws.SEGMENT, 3, 1))), ids=str)
def test_a_query_sees_what_the_mask_law_says(strategy: KVStrategy, chunk: int) -> None:
    laws.test_a_query_sees_what_the_mask_law_says(strategy, chunk, (1, 1))
    assert MlxPlan.attended


@pytest.mark.parametrize("strategy", READS, ids=str)
def test_a_rejected_draft_leaves_no_trace(strategy: KVStrategy) -> None:
    """Nor does MLX, which reads the same bytes, see one."""
    laws.check_rejected_drafts(strategy, 94, (1,))
    assert MlxPlan.attended
