"""What runs TinyModel in the laws: EXECUTORS, or MLX with `--executor mlx`, which has batched mode alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import has_mlx
from inference_engine.engine import Engine
from inference_engine.engine.results import SessionOpened
from inference_engine.kv.geometry import Geometry
from inference_engine.types import Mode
from tests import tiny

HERE = Path(__file__).parent
# About plans and attention of torch, those of MLX are in tests/mlx; and about identities of the native backend.
WITHOUT_EXECUTOR = ("test_identity_laws.py", "test_ragged_laws.py", "test_session_kv_laws.py", "test_variants.py")
# Changes the masks of torch's plan: what reads by numbers asks for none.
OF_MASKS = "test_restored_from_latents_without_what_comes_back_equals_sink_window"


@pytest.fixture(autouse=True)
def _on_its_executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--executor") == "mlx":
        from inference_engine.backends.mlx.forward import MlxForward
        from tests.mlx.tiny import run_on, tiny_mlx

        geometry = MlxForward.geometry

        def batched(forward: MlxForward, *, mode: Mode, **pages: int) -> Geometry:
            if mode is Mode.FIXED_SHAPE:
                pytest.skip("it is about fixed shapes, which MLX refuses")
            return geometry(forward, mode=mode, **pages)

        create = Engine.create_session

        def at_once(engine: Engine, *, guaranteed: bool | None = None, **words: Any) -> SessionOpened:
            if guaranteed is False:
                pytest.skip("it is about memory that is granted as a session grows; MLX gives it all at once")
            return create(engine, guaranteed=guaranteed, **words)

        monkeypatch.setattr(Engine, "create_session", at_once)
        monkeypatch.setattr(MlxForward, "geometry", batched)
        run_on(tiny_mlx, monkeypatch)
        # Memory of MLX is written once when an engine opens.
        monkeypatch.setitem(tiny.SMALL, "kv_bytes", 12 * 2**20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--executor") != "mlx":
        return
    left_out = [item for item in items if HERE in item.path.parents and not _is_for_mlx(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    if not has_mlx():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="the package mlx is not installed"))


def _is_for_mlx(item: Any) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    is_about_it = item.path.name not in WITHOUT_EXECUTOR and item.originalname != OF_MASKS
    return is_about_it and Mode.FIXED_SHAPE not in given.values()
