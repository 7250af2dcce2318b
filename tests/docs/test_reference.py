"""The reference pages leave nothing out. What they should have is asked of the running code, not of the generators."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
from prometheus_client import generate_latest

import kakeya
import kakeya.tokenization
import kakeya.tools
from inference_engine.cli.main import parser
from inference_engine.config import EngineConfig, ModelConfig, ServerConfig
from inference_engine.metrics import EngineMetrics
from inference_engine.models import file_keys
from kakeya.v1 import runtime_pb2
from laboratory.commands import evaluate
from scripts import generate_reference
from scripts.reference import command_line, metrics, model_files, python_sdk, settings, wire


def test_every_metric_that_is_exposed_is_on_the_page() -> None:
    exposed = re.findall(r"^# HELP (\S+) (.*)$", generate_latest(EngineMetrics().registry).decode(), re.MULTILINE)
    page = metrics.render()
    assert exposed
    for name, says in exposed:
        if not name.startswith("kakeya_"):  # the system's, and former names
            continue
        assert re.search(rf"^\| `{name}` \| .* \| {re.escape(says)} \|$", page, re.MULTILINE), name


@pytest.mark.parametrize("kind", [ModelConfig, EngineConfig, ServerConfig])
def test_every_setting_has_a_row_that_says_something(kind: type) -> None:
    page = settings.render()
    for field in fields(kind):
        assert re.search(rf"^\| `{field.name}` \| `[^`]+` \| \S.* \| \S.* \|$", page, re.MULTILINE), field.name


def test_every_rpc_message_field_and_value_of_the_contract_is_on_the_page() -> None:
    page = wire.render()
    contract = runtime_pb2.DESCRIPTOR
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for service in contract.services_by_name.values():
        for method in service.methods:
            assert f"| `{method.name}` | [{method.input_type.name}]" in sections[service.name]
    for message in contract.message_types_by_name.values():
        for field in message.fields:
            assert f"| {field.number} | `{field.name}` |" in sections[message.name]
        for enum in message.enum_types:
            assert all(f"| `{name}` |" in sections[f"{message.name}.{enum.name}"] for name in enum.values_by_name)
    for enum in contract.enum_types_by_name.values():
        assert all(f"| `{name}` |" in sections[enum.name] for name in enum.values_by_name)


@pytest.mark.parametrize("keys", [value for value in vars(file_keys).values() if isinstance(value, MappingProxyType)])
def test_every_key_of_a_models_files_is_on_the_page_with_what_becomes_of_it(keys: file_keys.Keys) -> None:
    page = model_files.render()
    assert keys
    for key, (effect, _) in keys.items():
        assert f"| `{key}` | {effect} |" in page


@pytest.mark.parametrize("module", [kakeya, kakeya.tokenization, kakeya.tools], ids=["kakeya", "tokenization", "tools"])
def test_every_public_name_of_the_python_sdk_is_on_the_page_with_its_members(module: ModuleType) -> None:
    page = python_sdk.render()
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL))
    for name in module.__all__:
        thing = getattr(module, name)
        assert name in sections
        if inspect.isclass(thing):
            for member, _ in inspect.getmembers(thing):
                ours = any(member in vars(base) for base in thing.__mro__ if base.__module__.startswith("kakeya."))
                if ours and not member.startswith("_") and not _is_shown_by_a_base(thing, member):
                    assert re.search(rf"`{member}\b|^{name}\.{member}\(", sections[name], re.MULTILINE), (
                        f"{name}.{member}"
                    )


def _is_shown_by_a_base(kind: type, member: str) -> bool:
    return any(hasattr(base, member) for base in kind.__bases__ if base.__name__ in kakeya.__all__)


def test_every_command_is_on_the_page() -> None:
    page = command_line.render()
    assert all(f"## kakeya evaluate {name}\n" in page for name in evaluate.EXPERIMENTS)
    top = next(action for action in parser()._actions if action.choices)
    assert all(f"## kakeya {name}" in page for name in top.choices or ())


def test_a_page_that_differs_from_the_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_reference, "FOLDER", tmp_path)
    monkeypatch.setattr(generate_reference, "PAGES", {"one.md": lambda: "as it is", "two.md": lambda: "as it is"})
    (tmp_path / "one.md").write_text("as it is")
    (tmp_path / "two.md").write_text("as it was")
    assert generate_reference.stale_pages() == ["two.md"]
