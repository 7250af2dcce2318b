"""MLX gives transformers' logits: families by their twins, dtypes, far positions, parts in the pool and beside it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import traceback

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from inference_engine.backends.mlx import region_attention as attention
from inference_engine.backends.mlx.forward import _ByPlan
from inference_engine.backends.mlx.operation_kernels import AttendCall, _routed
from inference_engine.backends.mlx.program import _streams
from inference_engine.backends.mlx.reading import Visible
from inference_engine.backends.mlx.trial import try_list
from inference_engine.backends.twin import TwinSizes, text_generator
from inference_engine.kernels.attention import attend as attend_in_torch
from inference_engine.kernels.reads import BlockRead
from inference_engine.kernels.routing import Router
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.strategies.full import Full
from tests.admissions import traits_of
from tests.backends.test_latent_families import SIZES
from tests.further import off_metal, off_metal_test
from tests.mlx.tiny import tiny_mlx
from tests.native.test_forward import FAMILIES, Sessions, ids_of
from tests.tiny import VOCABULARY, tiny_forward

# And of those whose attention is latent: experts in groups; queries that are compressed or not.
LATENT = {
    "deepseek_v3": DeepseekV3Config(**SIZES),
    "deepseek_v2": DeepseekV2Config(**SIZES | {"q_lora_rank": None, "topk_method": "greedy"}),
    "glm4_moe_lite": Glm4MoeLiteConfig(num_hidden_layers=3),
}
ON_MLX = FAMILIES | LATENT
FIRST = ("llama", "gemma3", "gemma4", "qwen3_5", "granitemoehybrid", "deepseek_v3")


@pytest.mark.parametrize("family", [each if each in FIRST else off_metal(each) for each in ON_MLX])
def test_a_list_gives_the_logits_of_transformers(family: str) -> None:
    config, kind = text_generator(ON_MLX[family])
    sizes = TwinSizes(head_dim=32, kv_heads=1) if family == "qwen2" else TwinSizes()
    traits = traits_of(config, kind)  # which do not depend on sizes

    assert try_list(kind, config, traits, seed=1, sizes=sizes) < 2e-4


def test_experts_that_no_logit_speaks_for_have_no_weight() -> None:
    """As everywhere: not one that is no number."""
    router = Router(chosen=2, scores="sigmoid", sums_to_one=True)
    logits = np.full((1, 4), -200.0, np.float32)
    _, expected = router.choose(torch.from_numpy(logits))
    assert np.array_equal(np.array(_routed(router, mx.array(logits), None)[1]), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, off_metal(torch.float16)], ids=str)
def test_fewer_bits_give_the_same_logits_up_to_their_rounding(dtype: torch.dtype) -> None:
    ids = ids_of(60)
    expected = Sessions(tiny_forward(), Full()).logits(0, ids, range(16, 60, 16))
    sessions = Sessions(tiny_mlx(dtype=dtype), Full())
    found = sessions.logits(0, ids, range(16, 60, 16))

    assert sessions.context.pool.memory.dtype == dtype
    # Twelve products in a row, each rounded to as many bits.
    assert float((found - expected).norm() / expected.norm()) < 12 * torch.finfo(dtype).eps


def test_an_entry_too_large_for_float16_is_seen_and_not_lost_in_a_softmax() -> None:
    from inference_engine.backends.mlx.forward import _kept

    states = mx.array([1.0, float("inf"), -float("inf")], dtype=mx.float16)
    assert np.isnan(np.array(_kept(states))).tolist() == [False, True, True]


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_parts_read_where_they_lie_and_parts_that_are_copied_give_attention_over_all(
    queries: int, softcap: float | None
) -> None:
    rng = np.random.default_rng(queries)
    q = rng.standard_normal((queries, 4, 16), np.float32)
    parts = [tuple(rng.standard_normal((2, count, 16), np.float32) for _ in range(2)) for count in (7, 30, queries)]
    kept, new = rng.random((queries, 37)) < 0.7, np.tri(queries, dtype=np.bool_)
    all_keys, all_values = (torch.from_numpy(np.concatenate(states, axis=1)) for states in zip(*parts, strict=True))
    seen = torch.from_numpy(np.concatenate([kept, new], axis=1))
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    expected = attend_in_torch(torch.from_numpy(q), all_keys, all_values, mask, scaling=0.3, softcap=softcap)

    visible = Visible((0, 7), (7, 37), mx.array(kept), mx.array(new))
    for most_copied in (0, 2**20):
        pairs = [(mx.array(keys), mx.array(values)) for keys, values in parts]
        found = attention.attend(
            mx.array(q), pairs, visible, scaling=0.3, softcap=softcap, most_copied_bytes=most_copied
        )
        assert np.allclose(np.array(found), expected.numpy(), atol=1e-5)


def test_a_step_that_wants_no_logits_asks_for_nothing_of_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is not started for them, and what no one asks for is not computed: the rest of the last layer."""
    rows: list[int] = []
    norm = mx.fast.rms_norm

    def recorded(states: mx.array, weights: mx.array, epsilon: float) -> mx.array:
        rows.append(len(states))
        return norm(states, weights, epsilon)

    monkeypatch.setattr(mx.fast, "rms_norm", recorded)
    program = tiny_mlx(seed=7)._program
    ids, positions = np.arange(1, 6), np.arange(5)
    logits, tapped = program.run(ids, positions, attending_to_nothing, logit_queries=(), tap_layers=(1,))
    assert rows
    assert set(rows) == {5}
    assert logits.shape == (0, VOCABULARY)
    asked, also_tapped = program.run(ids, positions, attending_to_nothing, logit_queries=(4,), tap_layers=(1,))
    assert asked.shape == (1, VOCABULARY)
    assert tapped is not None
    assert also_tapped is not None
    assert np.array_equal(np.array(tapped), np.array(also_tapped))


def attending_to_nothing(
    call: AttendCall, queries: mx.array, keys: mx.array | None, values: mx.array | None
) -> mx.array:
    return queries.reshape(len(queries), -1)


LACKS = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackError)."


@pytest.mark.parametrize(
    ("is_by_plan", "place", "message"),
    [
        (False, "async_eval", "[metal::malloc] Unable to allocate 1 bytes."),
        (False, "synchronize", LACKS),
        (True, "eval", "[metal::malloc] Resource limit (499000) exceeded."),
        (True, "synchronize", LACKS),
    ],
    ids=["a buffer", "said afterwards", "where the plan attends", "said afterwards where the plan attends"],
)
def test_a_step_without_memory_fails_as_on_other_devices(
    is_by_plan: bool, place: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And writes nothing into the pool."""
    monkeypatch.setattr(StepPlan, "records", (BlockRead(blocks=1),) * is_by_plan)
    sessions = Sessions(tiny_mlx(), Full())

    def fail(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(mx, place, fail)
    with pytest.raises(MemoryError, match=re.escape(message)) as caught:
        sessions.step((0, ids_of(4)))
    assert is_raised_by_plan(caught.value.__cause__) == is_by_plan
    assert not sessions.context.pool.memory.any()


def is_raised_by_plan(error: BaseException | None) -> bool:
    """Was it the plan that attended?"""
    assert error is not None
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(isinstance(caller, _ByPlan) for caller in callers)


def test_the_pool_is_the_same_memory_for_both_and_goes_with_the_engine() -> None:
    forward = tiny_mlx(seed=5)
    sessions = Sessions(forward, Full())
    (memory,) = forward._pools.values()
    sessions.step((0, ids_of(16)))
    host = sessions.context.pool.memory
    assert int((host != 0).sum()) == int((memory != 0).sum()) > 0
    del sessions, host
    assert not forward._pools


def test_a_step_copies_nothing_of_the_pool() -> None:
    forward = tiny_mlx(seed=6)
    sessions = Sessions(forward, Full())
    size = sum(pool.nbytes for pool in forward._pools.values())
    sessions.step((0, ids_of(16)))
    before = mx.get_active_memory()
    assert before >= size
    mx.reset_peak_memory()
    for first in range(16, 60, 4):
        sessions.step((0, ids_of(60)[first : first + 4]))
    assert mx.get_peak_memory() - before < size / 16


ENDS = """
import sys, threading
import mlx.core as mx
from inference_engine.backends.mlx.operation_kernels import _silu_gated
from inference_engine.backends.mlx.program import _streams

def compute():
    if sys.argv[1] == "begun":
        _streams.begin()
    mx.eval(_silu_gated(mx.ones(4), mx.ones(4)))

threads = [threading.Thread(target=compute) for _ in range(2)]
[(thread.start(), thread.join()) for thread in threads]
"""


@off_metal_test
def test_a_process_whose_threads_computed_ends_well() -> None:
    """Streams of a thread end with it: mlx 0.32 aborts otherwise."""
    sessions, begun = Sessions(tiny_mlx(), Full()), []

    def step() -> None:
        sessions.step((0, [1, 2, 3]))
        begun.append(_streams.last is not None)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert begun == [True]
    ended = subprocess.run([sys.executable, "-c", ENDS, "begun"], capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
