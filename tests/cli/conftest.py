"""A model folder that loads in no time, for commands that need one, and no settings of the tester's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_engine.config import child_environment
from tests.processes import Server, kakeya_serve
from tests.tiny_folder import save_tiny_chat_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[Server]:
    with kakeya_serve("--model", tiny_folder, "--kv-bytes=64MiB", "--metrics-bind=127.0.0.1:0") as server:
        yield server


@pytest.fixture(autouse=True)
def no_settings_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in child_environment():
        if name.startswith("KAKEYA_"):
            monkeypatch.delenv(name)
