"""What runs TinyModel in the laws: torch, or MLX with `--executor mlx`, which has batched mode alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.types import Mode
from tests import tiny

HERE = Path(__file__).parent
# About plans and attention of torch; those of MLX are in tests/mlx.
WITHOUT_EXECUTOR = ("test_ragged_laws.py", "test_session_kv_laws.py", "test_variants.py")


@pytest.fixture(autouse=True)
def _on_its_executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--executor") == "mlx":
        from tests.mlx.tiny import tiny_mlx

        monkeypatch.setattr(tiny, "tiny_forward", tiny_mlx)
        # Memory of MLX is written once when an engine opens.
        monkeypatch.setitem(tiny.SMALL, "kv_bytes", 12 * 2**20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--executor") != "mlx":
        return
    left_out = [item for item in items if HERE in item.path.parents and not _is_for_mlx(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _is_for_mlx(item: Any) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return item.path.name not in WITHOUT_EXECUTOR and Mode.FIXED_SHAPE not in parameters
