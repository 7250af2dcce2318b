"""Gemma 4 on the native backend: what its tests on torch say, and a token's bits are its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedModel

from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.native.program import Program
from inference_engine.backends.native.trial import LoadedTensors
from inference_engine.backends.read_model_spec import spec_of_seam
from inference_engine.backends.twin import TOLERANCE, Twin, TwinSizes, _try_strategy
from inference_engine.kv.strategies import strategy_kinds
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.models.families import step_list
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.native.library import KVType, ProductIdentity
from inference_engine.types import ModelFacts
from tests.admissions import admitted_once
from tests.backends.small_families import continues_as_transformers, fills_its_bound
from tests.backends.test_gemma4 import each_kind, gemma4
from tests.native.test_forward import Sessions, ids_of
from tests.tiny import PAGES
from tests.tiny_native import library


@lru_cache
def model_of(kind: str) -> PreTrainedModel:
    return gemma4(kind)


def native_of(
    kind: str, *, kv_type: KVType = KVType.FLOAT32, threads: int = 1, level: str = "auto", together: bool = True
) -> NativeForward:
    """together: False makes queries read by views."""
    own = model_of(kind)
    config = copy.deepcopy(own.config)
    config._attn_implementation = ATTENTION
    taken = type(own)(config).eval()
    taken.load_state_dict(own.state_dict())
    forward = program_of(Seam(taken, admitted_once(own.config, type(own)).traits), kv_type, threads, level)
    if not together:
        forward._ops = replace(forward._ops, attends_together=False)
    return forward


def program_of(seam: Seam, kv_type: KVType, threads: int = 1, level: str = "auto") -> NativeForward:
    checkpoint, spec = LoadedTensors.of_model(seam.model.state_dict()), spec_of_seam(seam)
    program = Program(
        library(),
        step_list(spec.config, spec.layers, checkpoint.names(), spec.reads),
        checkpoint,
        spec.rotaries,
        trained_positions=spec.trained_positions,
        identity=ProductIdentity.EXACT,
        kv_type=kv_type,
        threads=threads,
        level=level,
    )
    facts = ModelFacts(
        model_id="gemma4",
        vocab_size=program.steps.vocabulary,
        trained_positions=spec.trained_positions,
        device="cpu",
        dtype="float32",
        backend="native",
    )
    return NativeForward(spec, facts, program)


@each_kind
def test_sessions_their_forks_and_second_turns_continue_as_transformers_does(kind: str) -> None:
    forward = native_of(kind)
    continues_as_transformers(model_of(kind), forward, drafts=True)
    fills_its_bound(forward)


@each_kind
def test_every_strategy_gives_the_logits_that_it_stands_for(kind: str, subtests: pytest.Subtests) -> None:
    own = model_of(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = Twin(type(own), own.config, admitted_once(own.config, type(own)).traits, TwinSizes())
    twin.forward = program_of(twin.seam, KVType.FLOAT32)
    twin.geometry = twin.forward.geometry(page_tokens=4, segment_tokens=16)
    for strategies in strategy_kinds().values():
        for strategy in strategies.trials(twin.geometry):
            with subtests.test(strategy=str(strategy)):
                found, why = _try_strategy(type(own), twin, strategy)
                assert found is not None and found <= TOLERANCE, why


@each_kind
@pytest.mark.parametrize("kv_type", [KVType.FLOAT32, KVType.FLOAT16], ids=lambda kv_type: kv_type.name)
def test_a_token_s_bits_are_its_own(kind: str, kv_type: KVType) -> None:
    """However tokens are cut, beside others, and on any level and number of threads."""
    ids, strategy, forward = ids_of(80), SinkWindow(sink=2, window=40), native_of(kind, kv_type=kv_type)
    expected = Sessions(forward, strategy).logits(0, ids, range(16, 80, 16))
    assert torch.equal(Sessions(forward, strategy).logits(0, ids, range(1, 80)), expected)
    for level in library().levels():
        other = native_of(kind, kv_type=kv_type, threads=3, level=level)
        crowd, found = Sessions(other, Full(), strategy), []
        for first in range(0, 80, 8):
            result, parts = crowd.step((0, ids_of(8, first)), (1, ids[first : first + 8]))
            found.append(result.logits[parts[1]])
        assert torch.equal(torch.cat(found), expected), level


@each_kind
def test_an_entry_has_its_bytes_however_it_is_read(kind: str) -> None:
    """Of values that are keys, what both are once."""
    ids, cuts = ids_of(48), range(16, 48, 16)
    by_numbers, by_views = (native_of(kind, kv_type=KVType.FLOAT16, together=together) for together in (True, False))
    found, other = (Sessions(forward, Full()).logits(0, ids, cuts) for forward in (by_numbers, by_views))
    torch.testing.assert_close(found, other, atol=2e-3, rtol=2e-3)
    sizes = {"large": 3 * 4 * 16 + 40, "mixture": 3 * 4 * 16 + 40, "small": 3 * 2 * 16 + 2 * 32}
    assert by_numbers.geometry(**PAGES).entry_bytes == 2 * sizes[kind]
