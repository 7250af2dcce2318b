"""A model folder from somewhere else cannot run code, read outside itself or hang its reader: it is refused first."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inference_engine.errors import ModelError
from inference_engine.models import load_model, tokenizer_folder

pytestmark = pytest.mark.hostile

CODE_THAT_LEAVES_A_TRACE = "from pathlib import Path\nPath({canary!r}).touch()\n"


class _LeavesATrace:
    """Unpickling this creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "code-has-run"


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def refusal(folder: Path, cache: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), cache=cache)
    return str(caught.value)


def test_the_unspoilt_folder_loads(folder: Path, cache: Path) -> None:
    assert load_model(str(folder), cache=cache).model_id == "tiny-llama"


def test_a_missing_folder_is_refused_with_the_names_that_are_known(cache: Path) -> None:
    message = refusal(Path("no-such-model"), cache)
    assert "no-such-model" in message
    assert "smollm2-135m" in message


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model"
    path.write_text("not a folder")
    assert "no such folder" in refusal(path, cache)


def test_a_folder_without_configuration_is_refused(folder: Path, cache: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder, cache)


@pytest.mark.parametrize("name", ["modeling_tiny.py", "custom_generate/generate.py", "Setup.PY", "lib.so"])
def test_code_is_refused_and_not_run(folder: Path, cache: Path, canary: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(CODE_THAT_LEAVES_A_TRACE.format(canary=str(canary)))
    message = refusal(folder, cache)
    assert name in message
    assert not canary.exists()


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "pkl", "ckpt", "gguf", "h5", "msgpack"])
def test_weights_that_are_not_safetensors_are_refused_and_not_opened(
    folder: Path, cache: Path, canary: Path, suffix: str
) -> None:
    path = folder / f"pytorch_model.{suffix}"
    path.write_bytes(pickle.dumps(_LeavesATrace(canary)))
    assert path.name in refusal(folder, cache)
    assert not canary.exists()


@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "zip"])
def test_a_pickle_under_the_name_of_safetensors_is_refused_and_not_opened(
    folder: Path, cache: Path, canary: Path, save: Callable[..., None]
) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        save(_LeavesATrace(canary), file)
    message = refusal(folder, cache)
    assert "model.safetensors: not a safetensors file" in message
    assert not canary.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_configuration_that_asks_for_code_is_refused(folder: Path, cache: Path, canary: Path, name: str) -> None:
    edit_json(folder / name, auto_map={"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"})
    message = refusal(folder, cache)
    assert name in message
    assert "auto_map" in message


def test_a_request_for_code_is_found_at_any_depth(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", text_config=[{"inner": {"auto_map": {"AutoConfig": "a.B"}}}])
    assert "auto_map" in refusal(folder, cache)


@pytest.mark.parametrize("key", ["quantization_config", "transformers_weights"])
def test_a_configuration_that_leads_the_loader_elsewhere_is_refused(folder: Path, cache: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: "../other.safetensors"})
    assert key in refusal(folder, cache)


def test_an_adapter_which_names_another_model_is_refused(folder: Path, cache: Path) -> None:
    edit_json(folder / "adapter_config.json", base_model_name_or_path="somewhere/else")
    assert "adapter_config.json" in refusal(folder, cache)


def test_a_checkpoint_of_distributed_training_is_refused(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").rename(folder / "shard-00000-model-00001-of-00001.safetensors")
    assert "shard-00000" in refusal(folder, cache)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000, '"config"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_not_an_object_is_refused(folder: Path, cache: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    assert name in refusal(folder, cache)


def test_a_configuration_without_a_model_type_is_refused(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", model_type=None)
    assert "model_type" in refusal(folder, cache)


def test_an_unknown_architecture_is_refused(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", model_type="no-such-architecture", architectures=["NoSuch"])
    assert "no-such-architecture" in refusal(folder, cache)


def test_more_layers_than_tensors_are_refused_before_they_are_built(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=10**9)
    assert "num_hidden_layers is 1000000000" in refusal(folder, cache)


def test_links_that_lead_out_are_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "secret.json"
    outside.write_text("{}")
    (folder / "tokenizer.json").symlink_to(outside)
    message = refusal(folder, cache)
    assert "tokenizer.json" in message
    assert "leads out of the folder" in message


def test_linked_folders_that_lead_out_are_refused(folder: Path, cache: Path, tmp_path: Path) -> None:
    (folder / "more").symlink_to(tmp_path)
    assert "leads out of the folder" in refusal(folder, cache)


@pytest.mark.parametrize("target", ["nowhere", "tokenizer.json"], ids=["dangling", "to itself"])
def test_links_that_lead_nowhere_are_refused(folder: Path, cache: Path, target: str) -> None:
    (folder / "tokenizer.json").symlink_to(target)
    assert "leads nowhere" in refusal(folder, cache)


def test_links_within_the_folder_are_followed(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    assert load_model(str(folder), cache=cache).vocab_size == 96


def test_a_pipe_is_refused_and_not_waited_for(folder: Path, cache: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")
    assert "plain files only" in refusal(folder, cache)


def test_a_folder_without_weights_is_refused(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder, cache)


def test_a_shard_that_is_listed_but_missing_is_refused(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    edit_json(folder / "model.safetensors.index.json", weight_map=shards)
    message = refusal(folder, cache)
    assert "model-2.safetensors" in message
    assert "missing" in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "weights/model.safetensors", "model.bin", 7])
def test_a_shard_that_is_not_a_safetensors_file_beside_the_index_is_refused(
    folder: Path, cache: Path, shard: object
) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": shard})
    assert repr(shard) in refusal(folder, cache)


def test_weights_of_another_shape_are_refused(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=64)
    assert "transformers cannot load it" in refusal(folder, cache)


def test_weights_that_lack_a_tensor_are_refused_with_its_name(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    message = refusal(folder, cache)
    assert "missing keys" in message
    assert "model.layers.2." in message


def test_weights_with_a_tensor_too_many_are_refused_with_its_name(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=1)
    message = refusal(folder, cache)
    assert "unexpected keys" in message
    assert "model.layers.1." in message


def test_a_model_that_does_not_say_how_long_histories_may_be_is_refused(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=0)
    assert "max_position_embeddings" in refusal(folder, cache)


def test_a_tokenizer_is_looked_for_in_checked_folders_only(folder: Path, cache: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(str(folder), cache) == folder
    (folder / "tokenization_tiny.py").write_text("raise SystemExit")
    with pytest.raises(ModelError, match="tokenization_tiny"):
        tokenizer_folder(str(folder), cache)


def test_a_folder_without_tokenizer_says_so(folder: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match="holds no tokenizer"):
        tokenizer_folder(str(folder), cache)


def test_a_second_weights_file_that_is_damaged_is_refused_too(folder: Path, cache: Path) -> None:
    save_file({"a": torch.zeros(4)}, folder / "extra.safetensors")
    (folder / "extra.safetensors").write_bytes((folder / "extra.safetensors").read_bytes()[:-1])
    assert "extra.safetensors: truncated" in refusal(folder, cache)
