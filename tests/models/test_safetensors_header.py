"""A weights file is whole or it is refused, before a byte of it is mapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from inference_engine.errors import ModelError
from inference_engine.models.safetensors_header import check_safetensors


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    return path


def with_header(path: Path, header: bytes, body: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    return path


def test_a_file_cut_at_any_byte_is_refused(weights: Path, tmp_path: Path) -> None:
    content = weights.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.safetensors"):
            check_safetensors(cut)


NO_OFFSETS: list[object] = [
    {"a": {"data_offsets": [0]}},
    {"a": {"data_offsets": ["x", "y"]}},
    {"a": {"data_offsets": None}},
    {"a": {}},
    {"a": 1},
    {"__metadata__": {"format": 3}},
    {"__metadata__": None},
]


def test_a_header_without_offsets_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for tensors in NO_OFFSETS:
        with subtests.test(str(tensors)):
            path = with_header(tmp_path / "model.safetensors", json.dumps(tensors).encode())
            with pytest.raises(ModelError, match="header is damaged"):
                check_safetensors(path)


def test_a_pointer_of_git_lfs_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        check_safetensors(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(content=st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(lambda tail: b"\x10" + bytes(7) + tail)))
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        check_safetensors(path)
