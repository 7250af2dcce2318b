"""Steps as a list of operations: the logits are transformers', whatever the family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.backends import torch_loading
from inference_engine.backends.base import Forward
from inference_engine.backends.fused_operations import fuse
from inference_engine.backends.op_list_executor import KERNELS, OpListExecutor
from inference_engine.backends.torch_loading import try_listed
from inference_engine.backends.twin import text_generator
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.kernels.fused import PLAIN, Fused
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import AttentionCall
from inference_engine.kv.strategies.gather import Gather
from inference_engine.models.operations import Given, NoStepListError, Product, Write
from inference_engine.types import GenerateParams, Mode
from tests.admissions import traits_of
from tests.backends.test_families import SERVED, SIZES, write_model
from tests.further import further
from tests.laws.test_engine_laws import opened
from tests.laws.variants import drain, generate, text, tokens
from tests.native.test_forward import FAMILIES
from tests.tiny import PAGES, SMALL, tiny_forward_on


def listed_ops() -> DeviceOps:
    return DeviceOps(attends_together=True)


@pytest.mark.parametrize(
    "family",
    [
        further("llama"),
        further("qwen2"),
        "smollm3",
        further("gemma2"),
        "gemma3",
        "longrope",
        "qwen3_moe",
        "qwen2_moe",
        "glm4_moe",
    ],
)
def test_listed_steps_give_the_logits_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = OpListExecutor.run

    def counted(self: OpListExecutor, *arguments: Any) -> Any:
        ran.append(len(arguments[0]))
        return run(self, *arguments)

    monkeypatch.setattr(OpListExecutor, "run", counted)
    config, kind = text_generator(FAMILIES[family])
    traits = traits_of(config, kind)

    assert try_listed(kind, config, traits, ops=listed_ops(), device=torch.device("cpu")) < 2e-4
    assert set(ran) == {1, 32}


def does_not_fit(*_: object, **__: object) -> Tensor:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.usefixtures("trying_no_strategies")
@pytest.mark.parametrize(
    ("family", "fused", "numerics", "said"),
    [
        ("qwen3", PLAIN, "listed", ""),
        ("cohere2", PLAIN, "torch", "no list of operations for the model type 'cohere2'"),
        ("qwen3", replace(PLAIN, product=does_not_fit), "torch", "out of resource"),
    ],
    ids=["listed", "no list", "no kernel"],
)
def test_a_model_says_whether_its_steps_are_listed(
    family: str,
    fused: Fused,
    numerics: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a device that attends to the queries of all sessions together; generates as transformers does in any case."""
    monkeypatch.setattr(torch_loading, "open_ops", lambda *_: replace(listed_ops(), open_fused=lambda: fused))
    caplog.set_level("INFO", logger=torch_loading.__name__)
    own = write_model(tmp_path / "model", family, {**SIZES, **SERVED[family]})
    history = text(40)
    output = own.generate(torch.tensor([history]), max_new_tokens=12, do_sample=False)
    settings: dict[str, Any] = {"threads": 1, "backend": "torch", "linear": "plain"}  # as a GPU has no packed weights
    forward = open_backend(ModelConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"), **settings))

    assert forward.facts.numerics == numerics
    assert said in caplog.text
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, history)
        assert [token for token, _ in generate(engine, session, 12)] == output[0, len(history) :].tolist()


@pytest.mark.usefixtures("trying_no_strategies")
def test_steps_without_a_list_are_padded_to_be_batch_invariant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened_as(family: str, ops: DeviceOps, **settings: Any) -> Forward:
        monkeypatch.setattr(torch_loading, "open_ops", lambda *_: ops)
        folder = tmp_path / family
        if not folder.exists():
            write_model(folder, family, {**SIZES, **SERVED[family]})
        asked = {"threads": 1, "linear": "plain", "backend": "torch", "determinism": "batch-invariant", **settings}
        return open_backend(ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), **asked))

    used: list[str] = []

    def invariant_products() -> Fused:
        used.append("products")
        return PLAIN

    def invariant_attention(call: AttentionCall, out: Tensor) -> None:
        used.append("attention")
        attend_ragged.regions(call, out)

    ops = replace(
        listed_ops(),
        open_fused=lambda: pytest.fail("those of another identity"),
        open_invariant=invariant_products,
        attend_invariant=replace(attend_ragged, regions=invariant_attention),
    )
    forward = opened_as("qwen3", ops)
    assert forward.facts.numerics == "invariant"
    assert "products" in used
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, text(40))
        used.clear()
        generate(engine, session, 3)
    assert "attention" in used

    assert forward.geometry(**PAGES).token_quantum == 1
    assert opened_as("qwen3", listed_ops(), determinism="off").facts.numerics == "listed"
    for family, ops in (("cohere2", listed_ops()), ("qwen3", DeviceOps())):
        padded = opened_as(family, ops)
        assert (padded.facts.numerics, padded.facts.mode) == ("torch", Mode.FIXED_SHAPE)
        assert padded.geometry(**PAGES).token_quantum > 1


def test_what_there_is_no_kernel_for_is_refused_by_name() -> None:
    forward = tiny_forward_on("cpu", ops=listed_ops(), is_listed=True)
    assert forward.listed is not None
    steps = forward.listed.steps
    place, product = next((at, one) for at, one in enumerate(steps.operations) if isinstance(one, Product))
    part = replace(product, offset=16, count=16)
    operations = [*steps.operations[:place], part, *steps.operations[place + 1 :]]

    with pytest.raises(NoStepListError, match="give a part of heads"):
        fuse(replace(steps, operations=tuple(operations)), {"default": 16})
    missing = (Given(output="hidden"), Write(input="heads", layer=0), *steps.operations)
    with pytest.raises(NoStepListError, match="no kernel for Given, Write"):
        KERNELS.check(fuse(replace(steps, operations=missing), {"default": 16}))


def test_products_that_are_wrong_on_a_device_are_found_before_the_model_serves() -> None:
    """One output of a few tokens is left out, as by a tile that does not fit."""

    def leaves_one_out(*arguments: Any, **options: Any) -> Tensor:
        found = PLAIN.product(*arguments, **options)
        if len(found) > 1:
            found[-1, -1] = 0.0
        return found

    seam = tiny_forward_on("cpu").seam
    OpListExecutor(seam, PLAIN).check()

    with pytest.raises(NoStepListError, match="products of 2 tokens differ"):
        OpListExecutor(seam, replace(PLAIN, product=leaves_one_out)).check()


def test_listed_steps_choose_the_blocks_that_torchs_modules_choose() -> None:
    found = []
    for is_listed in (False, True):
        forward = tiny_forward_on("cpu", ops=listed_ops(), is_listed=is_listed)
        with Engine(forward, EngineConfig(**SMALL)) as engine:
            session = opened(engine, Gather(budget=48, block=8, sink=4, window=16), text(100))
            found.append(tokens(drain(engine.generate(session, GenerateParams(max_tokens=30)))))
    assert [token for token, _ in found[0]] == [token for token, _ in found[1]]
