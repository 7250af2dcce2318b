"""Programs and settings that documents show are those of the code."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from inference_engine.config import EngineConfig, ModelConfig, ServerConfig
from scripts.check_links import documents

# Reference pages show signatures, not programs; records say what made them, then.
DOCUMENTS = [path for path in documents() if path.parent.name != "reference" and "results" not in path.parts]
SETTINGS = {field.name for kind in (EngineConfig, ModelConfig, ServerConfig) for field in fields(kind)}


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def imported_names(program: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(textwrap.dedent(program))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("kakeya", "inference_engine"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_python_in_documents_imports_what_is_there(subtests: pytest.Subtests) -> None:
    for document in DOCUMENTS:
        with subtests.test(str(document)):
            for program in blocks(document, "python"):
                for module, name in imported_names(program):
                    assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_settings_files_in_documents_have_known_settings(subtests: pytest.Subtests) -> None:
    for document in DOCUMENTS:
        with subtests.test(str(document)):
            for text in blocks(document, "toml"):
                settings = tomllib.loads(text)
                settings.pop("project", None)  # of a pyproject.toml
                assert settings.keys() <= SETTINGS


def test_a_name_that_is_not_there_is_seen() -> None:
    assert list(imported_names("from kakeya import Client, Nothing\nimport json")) == [
        ("kakeya", "Client"),
        ("kakeya", "Nothing"),
    ]
