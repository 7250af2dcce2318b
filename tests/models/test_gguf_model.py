"""A GGUF file is a model: found, checked, loaded on torch with its own logits, and with its tokenizer."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from inference_engine.errors import ModelError
from inference_engine.models import (
    check_model,
    find_model,
    gguf_model,
    load_model,
    tokenizer_folder,
    weights_digest,
)
from inference_engine.models.mapped import MappedWeights
from inference_engine.models.open_checkpoint import open_checkpoint
from tests.models.hub_entry import write_entry
from tests.models.test_mapped import mapped, overwrite
from tests.models.tiny_folder import logits
from tests.models.tiny_gguf import FAMILIES, tiny_model, write_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "files" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    write_gguf(tiny_model("llama"), path, "Q8_0")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_gives_the_logits_of_the_model_it_was_made_of(family: str, tmp_path: Path, cache: Path) -> None:
    model, path = tiny_model(family), tmp_path / "tiny.gguf"
    write_gguf(model, path)
    loaded = load_model(str(path), cache=cache)
    assert (loaded.model_id, loaded.trained_positions, loaded.vocab_size) == ("tiny", 128, 259)
    assert type(loaded.model) is type(model)
    exact = 1e-5 if family.startswith("gemma") else 0.0  # one was added to its norms
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=exact)


def test_of_several_files_in_a_folder_one_must_be_named(file: Path, cache: Path) -> None:
    other = file.with_name("tiny-Q4_0.gguf")
    shutil.copy(file, other)
    with pytest.raises(ModelError, match=r"2 GGUF files \(tiny-Q4_0\.gguf, tiny-Q8_0\.gguf\); name the one"):
        find_model(str(file.parent), cache=cache)
    assert find_model(str(other), cache=cache).model_id == "tiny-Q4_0"


def test_a_split_model_is_named_by_any_of_its_files(tmp_path: Path, cache: Path) -> None:
    model, folder = tiny_model("qwen2"), tmp_path / "files"
    folder.mkdir()
    write_gguf(model, folder / "tiny.gguf", most_tensors=9)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    digests = "\n".join(hashlib.sha256(part.read_bytes()).hexdigest() for part in parts)
    for name in (folder, *parts):
        found = check_model(str(name), cache=cache)
        assert (found.model_id, found.folder, found.stored, found.weights) == ("tiny", folder, parts[0], tuple(parts))
        assert weights_digest(found) == hashlib.sha256(digests.encode()).hexdigest()
    # A snapshot of the hub's cache is of links, to files of other names.
    entry = write_entry(tmp_path / "hub", "org/tiny", folder)
    for name in (entry, entry / parts[1].name):
        torch.testing.assert_close(logits(load_model(str(name), cache=cache).model), logits(model), rtol=0, atol=0)
    with MappedWeights(*check_model(str(folder), cache=cache).weights) as weights, mapped(parts[2]):
        overwrite(parts[2])
        assert weights.spoiled() == f"{parts[2].name} was written to"


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"split.tensors.count": 7}, r"split\.tensors\.count is 7, the 3 parts hold 27 tensors"),
        ({"split.count": 2}, r"one of 2 parts of a model, which have names that end in -00001-of-00002\.gguf"),
        ({"split.no": 2}, r"tiny-00001-of-00003\.gguf: split\.no and split\.count are 2 and 3, the name says 0 and 3"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(
    values: dict[str, int], reason: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf", most_tensors=9)
    part = tmp_path / "tiny-00001-of-00003.gguf"
    content = part.read_bytes()
    for key, value in values.items():
        at = content.index(key.encode()) + len(key) + 4
        size = 4 if key.endswith("tensors.count") else 2
        content = content[:at] + value.to_bytes(size, "little") + content[at + size :]
    part.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        find_model(str(part), cache=cache)


@pytest.mark.hostile
def test_a_file_that_is_a_link_out_of_its_folder_is_refused(file: Path, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.gguf").symlink_to(file)
    with pytest.raises(ModelError, match="leads out of the folder"):
        find_model(str(other), cache=cache)
    assert find_model(str(other / "model.gguf"), cache=cache).stored == file  # named itself: allowed


@pytest.mark.hostile
def test_a_pipe_is_not_opened(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError):
        find_model(str(tmp_path / "model.gguf"), cache=cache)
    with pytest.raises(ModelError):
        find_model(str(tmp_path), cache=cache)


def rewritten(path: Path, family: str = "llama", *, leave_out: str = "", **numbers: int) -> Path:
    """A file with whole numbers under the family's name, and a vocabulary."""
    own = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **{name.replace("__", "."): value for name, value in numbers.items()},
    }
    writer = GGUFWriter(path, family)
    for name, value in own.items():
        if name != leave_out:
            writer.add_uint32(f"{family}.{name}", value)
    if leave_out != "epsilon":
        writer.add_layer_norm_rms_eps(1e-5)
    if leave_out != "token_embd.weight":
        writer.add_tensor("token_embd.weight", np.zeros((259, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"family": "mamba"}, "general.architecture is 'mamba', which cannot be served from GGUF; llama, qwen2"),
        ({"leave_out": "block_count"}, r"llama\.block_count is None, expected a positive number"),
        ({"leave_out": "epsilon"}, r"no llama\.attention\.layer_norm_rms_epsilon"),
        ({"leave_out": "token_embd.weight"}, r"no matrix token_embd\.weight"),
        ({"embedding_length": 0}, r"llama\.embedding_length is 0"),
        ({"embedding_length": 2**32 - 1}, r"llama\.embedding_length is 4294967295"),
        ({"block_count": 5000}, "5000 layers; at most 1024 can be served, and the file holds 1 tensors"),
        ({"expert_count": 8}, r"llama\.expert_used_count is None"),
        ({"rope__dimension_count": 8, "attention__key_length": 16}, "8 of the 16 numbers of a head are rotated"),
        ({"attention__key_length": 16, "attention__value_length": 8}, "keys of 16 numbers and values of 8"),
        ({"rope__scaling__of_tomorrow": 2}, r"llama\.rope\.scaling\.of_tomorrow: rotation scaled in this way"),
        ({"rope__scaling__attn_factor": 2}, r"llama\.rope\.scaling\.attn_factor is 2\.0 without YaRN"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path, cache: Path
) -> None:
    path = rewritten(tmp_path / "model.gguf", **change)
    with pytest.raises(ModelError, match=reason) as caught:
        find_model(str(path), cache=cache)
    assert str(path) in str(caught.value)


@pytest.mark.hostile
@pytest.mark.parametrize("hidden", [64, 2**30])
def test_weights_that_do_not_fit_are_refused_before_memory_is_taken(hidden: int, tmp_path: Path, cache: Path) -> None:
    path = rewritten(tmp_path / "model.gguf", embedding_length=hidden, attention__key_length=16)
    with pytest.raises(ModelError, match=r"model\.gguf: (no tensor model|model\.embed_tokens\.weight has the shape)"):
        load_model(str(path), cache=cache)


@pytest.mark.hostile
def test_a_tensor_of_another_family_is_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tiny_model("gemma2"), tmp_path / "gemma.gguf")
    content = (tmp_path / "gemma.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content.replace(b"gemma2", b"qwen2x"))
    with pytest.raises(ModelError, match=r"general\.architecture is 'qwen2x'"):
        open_checkpoint(tmp_path / "model.gguf")
    write_gguf(tiny_model("qwen2"), tmp_path / "qwen2.gguf")
    content = (tmp_path / "qwen2.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content.replace(b"blk.0.ffn_norm", b"blk.0.ssm_norm"))
    with pytest.raises(ModelError, match=r"the tensor blk\.0\.ssm_norm\.weight of the shape \(64,\) is not one"):
        check_model(str(tmp_path / "model.gguf"), cache=cache)


def test_a_file_that_is_written_to_while_it_is_mapped_is_noticed(file: Path) -> None:
    with MappedWeights(file) as weights, mapped(file):
        assert weights.spoiled() is None
        overwrite(file)
        assert weights.spoiled() == "tiny-Q8_0.gguf was written to"


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_beside_the_file_comes_first_if_the_folder_was_named(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(str(file.parent), cache) == file.parent
    asked: list[Path] = []

    def make(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(Path(command[-2]))
        Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", make)
    tokenizer_folder(str(file), cache)
    assert asked == [file]


@pytest.mark.hostile
def test_a_tokenizer_that_takes_for_ever_is_given_up(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "MAX_TOKENIZER_SECONDS", 0.01)
    with pytest.raises(ModelError, match=r"the limit of 0\.01 s is too short to make it; put the file"):
        tokenizer_folder(str(file), cache)
    assert list((cache / "tokenizers").iterdir()) == []
