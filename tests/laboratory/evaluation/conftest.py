"""A target to evaluate that needs no download: TinyModel as a folder, opened as `kakeya evaluate` opens one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from inference_engine.config import EngineConfig, ModelConfig
from laboratory.evaluation.models import Target, open_target
from tests.tiny import SMALL
from tests.tiny_folder import save_tiny_chat_model


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with _opened(tmp_path_factory) as target:
        yield target


@pytest.fixture(scope="session")
def tiny_torch_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with _opened(tmp_path_factory, backend="torch") as target:
        yield target


def _opened(tmp_path_factory: pytest.TempPathFactory, **options: Any) -> AbstractContextManager[Target]:
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    settings: dict[str, Any] = SMALL
    return open_target(ModelConfig(model=str(folder), threads=1, **options), EngineConfig(**settings))
