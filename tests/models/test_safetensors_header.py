"""A weights file is whole or it is refused, before a byte of it is mapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
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


HEADER = '{"__metadata__": {"a": "b"}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
TENSOR = '"a": {"dtype"'
CHANGES = (
    *(('{"a": "b"}', one) for one in ("null", "{}", '{"a": 3}', '{"a": null}', "[]", "3")),
    *((TENSOR, f'"{name}": {{"dtype"') for name in ("", "a/../b", r"\u0000", r"\ud83d\ude00", r"\ud83d")),
    *((TENSOR, f"{other}, {TENSOR}") for other in ('"__metadata__": {}', '"b": {}', '"b": 1')),
    *(("F32", one) for one in ("f32", "F16", "BOOL", "I32", 'F32", "dtype": "I32')),
    *(("[1]", one) for one in ("[1.0]", "[-1]", "[true]", "[NaN]", "[]", "[1, 1]", "[2]", "null", "1")),
    *(("[0, 4]", one) for one in ("[0]", "[0, 4, 4]", '["0", "4"]', "[0.0, 4.0]", "[4, 8]", "null")),
    *(("}}", f"}}}}{after}") for after in ("  ", "\n", "\0", "{}")),
    *(("}}", f', "more": {more}}}}}') for more in ("1", "Infinity")),
)


def test_a_header_is_taken_or_refused_as_by_the_reader_of_the_format(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for before, after in CHANGES:
        header = HEADER.replace(before, after)
        with subtests.test(header):
            path = with_header(tmp_path / "model.safetensors", header.encode(), bytes(4))
            try:
                with safe_open(path, "np") as reader:
                    names = {*reader.keys()}
            except SafetensorError:
                with pytest.raises(ModelError, match=r"header is damaged|is no type"):
                    check_safetensors(path)
            else:
                assert {*check_safetensors(path)} == names


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
