"""Models that the native backend does not run are refused by a typed error, or served by torch; none is run wrongly."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_engine.backends.base import Admitted
from inference_engine.backends.native.packed_weights import PackedWeights
from inference_engine.compose import admit, executor, open_backend
from inference_engine.config import ModelConfig
from inference_engine.errors import BackendError, ModelError
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.models.checkpoint import StoredTensor
from inference_engine.models.families import step_list
from inference_engine.models.operations import Attend
from tests.models.test_mapped import resident
from tests.models.tiny_gguf import FAMILIES, tiny_model
from tests.tiny_native import library

pytestmark = [pytest.mark.hostile, pytest.mark.usefixtures("trying_no_strategies")]

Tensors = dict[str, Tensor]
LAYER = "model.layers.1."
ATTENTION, MLP = f"{LAYER}self_attn.", f"{LAYER}mlp."


@pytest.fixture(autouse=True)
def _has_library() -> None:
    library()


class Folders:
    """Folders of tiny models, changed. A family is admitted once: what is changed here does not show in its twin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._admitted: dict[str, Admitted] = {}

    def make(
        self, family: str, change: Callable[[Tensors], Any] | None = None, **config: Any
    ) -> tuple[ModelConfig, Admitted]:
        folder = self.path / f"model-{len(list(self.path.iterdir()))}"
        tiny_model(family).save_pretrained(folder)
        settings = ModelConfig(model=str(folder), cache_dir=str(self.path / "cache"))
        if family not in self._admitted:
            self._admitted[family] = admit(settings)
        if config:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if change is not None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file({name: states.contiguous() for name, states in tensors.items()}, folder / "model.safetensors")
        return settings, self._admitted[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


def native(settings: ModelConfig) -> ModelConfig:
    return ModelConfig(model=settings.model, cache_dir=settings.cache_dir, backend="native")


def cut(name: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(shape)

    return change


def move_rows(tensors: Tensors) -> None:
    """As many outputs together as before."""
    tensors[f"{ATTENTION}q_proj.weight"] = torch.zeros(48, 64)
    tensors[f"{ATTENTION}k_proj.weight"] = torch.zeros(48, 64)


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


UNFIT: Mapping[str, tuple[str, Callable[[Tensors], None], str]] = {
    "norm": ("llama", cut(f"{LAYER}input_layernorm.weight", 48), r"input_layernorm\.weight has the shape \(48,\)"),
    "last norm": ("llama", cut("model.norm.weight", 80), r"model\.norm\.weight has the shape"),
    "too few words": ("llama", cut("model.embed_tokens.weight", 200, 64), r"embed_tokens\.weight has the shape"),
    "another head": ("qwen2", cut("lm_head.weight", 300, 64), r"lm_head\.weight has the shape \(300, 64\)"),
    "no head": ("qwen2", drop("lm_head.weight"), r"no tensor lm_head\.weight"),
    "inputs": ("llama", cut(f"{MLP}down_proj.weight", 64, 80), r"down_proj\.weight has the shape"),
    "a vector": ("llama", cut(f"{ATTENTION}o_proj.weight", 64), r"o_proj\.weight has the shape \(64,\)"),
    "a number": ("llama", cut(f"{ATTENTION}o_proj.weight"), r"o_proj\.weight has the shape \(\)"),
    "rows of q as k": ("llama", move_rows, r"(q|k)_proj\.weight has the shape"),
    "bias": ("qwen2", cut(f"{ATTENTION}k_proj.bias", 16), r"k_proj\.bias has the shape \(16,\)"),
    "no bias": ("qwen2", drop(*(f"{ATTENTION}{name}_proj.bias" for name in "qkv")), r"no tensor .*_proj\.bias"),
    "a bias too many": ("qwen3", cut(f"{MLP}down_proj.bias", 64), r"down_proj\.bias has no place"),
    "a norm too many": ("llama", cut(f"{ATTENTION}q_norm.weight", 16), r"q_norm\.weight has no place"),
    "router": ("qwen3moe", cut(f"{MLP}gate.weight", 3, 64), r"mlp\.gate\.weight has the shape \(3, 64\)"),
    "experts": (
        "qwen3moe",
        lambda tensors: drop(*[name for name in tensors if ".experts.3." in name])(tensors),
        r"no tensor .*experts\.3\.",
    ),
    "an expert of another size": (
        "qwen3moe",
        lambda tensors: tensors.update(
            {name: torch.zeros(48, 64) for name in tensors if ".experts.2.gate" in name or ".experts.2.up" in name}
        ),
        r"experts\.2\..* has the shape \(48, 64\)",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_do_not_fit_are_refused_by_name(case: str, folders: Folders) -> None:
    family, change, reason = UNFIT[case]
    settings, admitted = folders.make(family, change)

    with pytest.raises(BackendError, match=reason):
        open_backend(native(settings), admitted)
    with pytest.raises(ModelError, match=r"do not fit|cannot load"):
        open_backend(settings, admitted)


SERVED_BY_TORCH: Mapping[str, tuple[str, Callable[[Tensors], Any] | None, dict[str, Any], str]] = {
    "heads of 24": ("qwen3", None, {"head_dim": 24}, "head size 24 must"),
    "heads of 8": ("qwen3", None, {"head_dim": 8}, "head size 8 must"),
    "float64": (
        "llama",
        lambda tensors: tensors.update({name: states.double() for name, states in tensors.items()}),
        {},
        "stored as F64",
    ),
}


@pytest.mark.parametrize("case", SERVED_BY_TORCH)
def test_what_the_kernels_are_not_made_for_is_served_by_torch(case: str, folders: Folders) -> None:
    family, change, config, reason = SERVED_BY_TORCH[case]
    if config:
        own = FAMILIES[family]()
        for name, value in config.items():
            setattr(own, name, value)
        from transformers import AutoModelForCausalLM

        state = AutoModelForCausalLM.from_config(own).state_dict()
        if own.tie_word_embeddings:
            del state["lm_head.weight"]

        def change(tensors: Tensors) -> None:
            tensors.update({name: states.clone() for name, states in state.items()})

    settings, admitted = folders.make(family, change, **config)

    with pytest.raises(BackendError, match=reason):
        open_backend(native(settings), admitted)
    assert open_backend(settings, admitted).facts.backend == "torch"
    said = executor(settings)
    assert said[0] == "torch" and reason in said[1], "doctor and `models show` say so before anything is loaded"


def test_its_threads_end_when_a_model_is_dropped(folders: Folders) -> None:
    settings, admitted = folders.make("llama")
    asked = ModelConfig(model=settings.model, cache_dir=settings.cache_dir, backend="native", threads=3)
    before = _tasks()
    forward = open_backend(asked, admitted)
    own = _tasks() - before  # those of other tests may still be ending
    until = time.monotonic() + 10
    while len(own) > 2 and time.monotonic() < until:  # and so may those that packed the weights
        time.sleep(0.01)
        own = _tasks() - before
    assert len(own) == 2
    del forward
    gc.collect()
    assert not own & _tasks()


def _tasks() -> set[int]:
    """Threads that are not Python's."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("needs /proc")
    return {int(task.name) for task in tasks.iterdir()} - {thread.native_id for thread in threading.enumerate()}


def test_no_more_of_a_file_is_in_memory_than_what_is_packed_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    rows, inputs, count = 512, 1024, 6
    size = rows * inputs * 4
    numbers = np.random.default_rng(0).standard_normal((count, rows, inputs), np.float32)
    numbers.tofile(path)
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    tensors = {str(index): (rows, inputs) for index in range(count)}

    class File:
        def names(self) -> list[str]:
            return list(tensors)

        def tensor(self, name: str) -> StoredTensor:
            data = whole[int(name) * size : (int(name) + 1) * size]
            return StoredTensor(name=name, path=path, shape=tensors[name], encoding="F32", data=data)

    opened = library()
    most, pack = [], opened.pack

    def packing(*arguments: Any) -> Any:
        done = pack(*arguments)
        most.append(resident(path))
        return done

    monkeypatch.setattr(opened, "pack", packing)
    packed = PackedWeights(opened, File(), "auto")
    with packed.packing(1):
        for name in tensors:
            packed.add([name], (rows, inputs))
    assert len(most) == count and max(most) <= 1.5 * size, "what was read ahead counts, too"
    assert resident(path) <= size // 2


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_threads_pack_a_matrix_as_one_does(weights: str) -> None:
    shapes = {"a": (48, 64), "b": (70, 64)}  # the last tile of the second is not full
    numbers = {name: np.random.default_rng(1).standard_normal(shape, np.float32) for name, shape in shapes.items()}

    class File:
        def names(self) -> list[str]:
            return list(shapes)

        def tensor(self, name: str) -> StoredTensor:
            data = numbers[name].reshape(-1).view(np.uint8)
            return StoredTensor(name=name, path=Path(name), shape=shapes[name], encoding="F32", data=data)

    def packed(threads: int, at_once: int) -> bytes:
        found = PackedWeights(library(), File(), weights, at_once=at_once)
        with found.packing(threads):
            found.add(list(shapes), (118, 64))
        return found._tiles[0].tobytes()

    whole = packed(1, 2**20)
    assert packed(4, 1) == packed(2, 33 * 64) == whole


def test_layers_of_other_sizes_have_registers_of_their_own() -> None:
    model = tiny_model("llama")
    small = LayerGeometry(query_heads=4, kv_heads=2, head_dim=16)
    large = LayerGeometry(query_heads=4, kv_heads=1, head_dim=32)
    steps = step_list(model.config, [small, large, small], _names(model, 3))

    attends = [one for one in steps.operations if isinstance(one, Attend)]
    widths = [(steps.widths[one.input], steps.widths[one.output]) for one in attends]
    assert widths == [
        (128, 64),
        (192, 128),
        (128, 64),
    ]
    assert attends[0].input == attends[2].input


def _names(model: Any, layers: int) -> list[str]:
    """Of the tensors of a model with so many layers like its first one."""
    own = list(model.state_dict())
    first = [name for name in own if name.startswith("model.layers.0.")]
    more = [name.replace(".0.", f".{layer}.", 1) for layer in range(1, layers) for name in first]
    return [*own, *more]
