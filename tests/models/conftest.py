"""A cache of its own for every test, and a clean model folder to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models.tiny_folder import tiny_llama


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_llama, tmp_path / "tiny-llama"))
