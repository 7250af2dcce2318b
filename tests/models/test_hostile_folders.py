"""A model folder from somewhere else cannot run code, read outside itself or hang its reader.

What would run code is never opened, beside safetensors of a built-in architecture; what would be another model
without it is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_engine.compose import admit
from inference_engine.config import ModelConfig
from inference_engine.errors import ModelError
from inference_engine.models import check_model, load_model, tokenizer_folder
from kakeya import TokenizerError
from kakeya.tokenization import load_tokenizer
from tests.models.tiny_folder import logits, tiny_llama
from tests.tiny_folder import tiny_tokenizer

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


def test_a_folder_of_anything_else_is_not_searched_through(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "project" / "bin").mkdir(parents=True)
    (tmp_path / "project" / "bin" / "python").symlink_to("/usr/bin/env")
    (tmp_path / "project" / "bin" / "model.gguf").write_bytes(b"GGUF")
    assert "no config.json" in refusal(tmp_path, cache)


@pytest.mark.parametrize("name", ["modeling_llama.py", "custom_generate/generate.py", "Setup.PY", "lib.so"])
def test_code_is_ignored_and_not_run(folder: Path, cache: Path, canary: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(CODE_THAT_LEAVES_A_TRACE.format(canary=str(canary)))
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    edit_json(folder / "generation_config.json", auto_map={"AutoConfig": "Setup.Config"}, custom_generate=str(folder))
    assert check_model(str(folder), cache=cache).ignored == (name,)
    assert torch.equal(logits(load_model(str(folder), cache=cache).model), logits(tiny_llama()))
    assert not canary.exists()


WEIGHTS_OF_OTHERS = (
    *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "training_args.bin", "original/consolidated.00.pth"),
    *(
        "model.pt",
        "optimizer.ckpt",
        "scheduler.pkl",
        "model.gguf",
        "tf_model.h5",
        "flax_model.msgpack",
        "onnx/model.onnx",
    ),
    "rng_state.PTH",
)


@pytest.mark.parametrize("name", WEIGHTS_OF_OTHERS)
def test_weights_that_are_not_safetensors_are_ignored_and_not_opened(
    folder: Path, cache: Path, canary: Path, name: str
) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(_LeavesATrace(canary)))
    assert check_model(str(folder), cache=cache).ignored == (name,)
    assert torch.equal(logits(load_model(str(folder), cache=cache).model), logits(tiny_llama()))
    assert not canary.exists()


def test_what_people_keep_beside_a_model_is_ignored_and_listed(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {
        *("README.md", "LICENSE", ".gitattributes", ".git/HEAD", ".cache/huggingface/download/config.json.metadata"),
        *("images/plot.png", "eval_results.json", "trainer_state.json", "preprocessor_config.json"),
    }
    missed = ("configuration_llama.py", "consolidated.safetensors", "original/params.pth", "training_args.bin")
    for name in (*names, *missed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
        (folder / name).write_text("{}")
    ignored = check_model(str(folder), cache=cache).ignored
    assert set(ignored) == {*names, *missed}
    assert ignored[: len(missed)] == missed  # first those whose absence may matter
    with caplog.at_level("INFO", logger="inference_engine.models"):
        load_model(str(folder), cache=cache)
    assert [record.getMessage() for record in caplog.records] == [
        f"tiny-llama: code and other formats are ignored: {', '.join(missed)}"
    ]


def test_transformers_sees_nothing_that_is_ignored(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("modeling_x.py", "adapter_model.safetensors", "kernels.json", "pytorch_model.bin", "tokenizer.json"):
        (folder / name).write_text("{}")
    seen: list[set[str]] = []
    own = AutoModelForCausalLM.from_pretrained

    def look(place: Path, **options: Any) -> Any:
        seen.append({path.name for path in Path(place).iterdir()})
        return own(place, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", look)
    load_model(str(folder), cache=cache)
    assert seen == [{"config.json", "model.safetensors"}]


@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "zip"])
def test_a_pickle_under_the_name_of_safetensors_is_refused_and_not_opened(
    folder: Path, cache: Path, canary: Path, save: Callable[..., None]
) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        save(_LeavesATrace(canary), file)
    message = refusal(folder, cache)
    assert "model.safetensors: not a safetensors file" in message
    assert not canary.exists()


def test_a_model_with_a_class_of_its_own_is_refused(folder: Path, cache: Path) -> None:
    """What is built in under its type may be another model."""
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"})
    message = refusal(folder, cache)
    assert "TinyForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_a_model_that_is_its_own_code_alone_is_refused(folder: Path, cache: Path, canary: Path) -> None:
    (folder / "modeling_tiny.py").write_text(CODE_THAT_LEAVES_A_TRACE.format(canary=str(canary)))
    edit_json(
        folder / "config.json",
        model_type="tiny",
        auto_map={"AutoConfig": "modeling_tiny.Config", "AutoModelForCausalLM": "modeling_tiny.Tiny"},
    )
    message = refusal(folder, cache)
    assert "no model of type 'tiny' without the code that it brings, which is never run" in message
    assert not canary.exists()


def test_code_of_a_tokenizer_is_not_run(folder: Path, cache: Path, canary: Path) -> None:
    tiny_tokenizer().save_pretrained(folder)
    (folder / "tokenization_tiny.py").write_text(CODE_THAT_LEAVES_A_TRACE.format(canary=str(canary)))
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_tiny.Tiny", None]})
    tokenizer = load_tokenizer(tokenizer_folder(str(folder), cache))
    assert tokenizer.encode("abc") == tiny_tokenizer().encode("abc")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="TinyTokenizer")
    with contextlib.suppress(TokenizerError):
        load_tokenizer(tokenizer_folder(str(folder), cache))
    assert not canary.exists()


def test_a_request_for_code_is_found_at_any_depth(folder: Path, cache: Path) -> None:
    edit_json(folder / "config.json", text_config=[{"inner": {"auto_map": {"AutoConfig": "a.B"}}}])
    assert "auto_map" in refusal(folder, cache)


@pytest.mark.parametrize("key", ["quantization_config", "transformers_weights"])
def test_a_configuration_that_leads_the_loader_elsewhere_is_refused(folder: Path, cache: Path, key: str) -> None:
    edit_json(folder / "config.json", **{key: "../other.safetensors"})
    assert key in refusal(folder, cache)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000, '"config"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_not_an_object_is_refused(folder: Path, cache: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    assert name in refusal(folder, cache)


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


@pytest.mark.parametrize("target", ["nowhere", "tokenizer.json"], ids=["dangling", "to itself"])
def test_links_that_lead_nowhere_are_refused(folder: Path, cache: Path, target: str) -> None:
    (folder / "tokenizer.json").symlink_to(target)
    assert "leads nowhere" in refusal(folder, cache)


def test_links_within_the_folder_are_followed(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    assert load_model(str(folder), cache=cache).vocab_size == 96


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


def test_a_shard_that_is_damaged_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "sharded"
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard.name}: truncated" in refusal(folder, cache)


CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"model_type": None}, ("model_type",)),
    ({"model_type": "no-such", "architectures": ["NoSuch"]}, ("has no model of type 'no-such'",)),
    ({"intermediate_size": 64}, ("mismatched keys", "mlp")),
    ({"num_hidden_layers": 3}, ("missing keys", "model.layers.2.")),
    ({"num_hidden_layers": 1}, ("has no place", "model.layers.1.")),
    ({"num_hidden_layers": 500}, ("num_hidden_layers is 500, but the weights hold",)),
    ({"max_position_embeddings": 0}, ("max_position_embeddings",)),
]


def test_a_configuration_that_does_not_fit_its_weights_is_refused_by_name(
    folder: Path, cache: Path, subtests: pytest.Subtests
) -> None:
    whole = (folder / "config.json").read_text(encoding="utf-8")
    for changed, words in CONTRADICTIONS:
        with subtests.test(str(changed)):
            (folder / "config.json").write_text(whole, encoding="utf-8")
            edit_json(folder / "config.json", **changed)
            message = refusal(folder, cache)
            assert all(word in message for word in words)


def test_a_pipe_is_refused_and_not_waited_for(folder: Path, cache: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")
    assert "plain files only" in refusal(folder, cache)


def test_a_refusal_has_the_reason_of_the_library_and_nothing_that_a_terminal_obeys(folder: Path, cache: Path) -> None:
    for key, value in (("hidden_act", "strange\x1b[2J"), ("rope_parameters", {"rope_type": "strange\x1b[2J"})):
        config = (folder / "config.json").read_text()
        edit_json(folder / "config.json", **{key: value})
        with pytest.raises(ModelError, match=r"know: .*strange\\+x1b\[2J"):
            admit(ModelConfig(model=str(folder), cache_dir=str(cache)))
        (folder / "config.json").write_text(config)
    edit_json(folder / "config.json", vocab_size="x" * 10_000)
    assert "vocab_size" in (said := refusal(folder, cache)) and len(said) < 1000
