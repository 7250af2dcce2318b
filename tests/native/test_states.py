"""Recurrent states on the native backend: after whole chunks, and the entries of the tokens since."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.backends.base import Step
from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.native.program import Program
from inference_engine.backends.native.trial import LoadedTensors
from inference_engine.compose import open_backend
from inference_engine.config import ModelConfig
from inference_engine.errors import InvariantViolated
from inference_engine.kv.parts.open_chunk import OpenChunkStates
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.models.operations import Convolve, DeltaRule, Given, SelectiveScan, StateSizes, StepList
from inference_engine.native.library import KVType, NativeStep, ProductIdentity, StateSpan
from inference_engine.types import Mode
from tests.backends.test_hybrids import config_of, own_of
from tests.further import further
from tests.laws.variants import text
from tests.native.test_forward import Sessions, ids_of
from tests.tiny import DELTA, MAMBA
from tests.tiny_native import library, tiny_native

CHUNK, ROOM = 8, 16  # as the kernels have them
# Relative to the largest number: float32 in another order than float64.
ROUNDING = 2e-5
Floats = NDArray[np.float64]


# -- the kernels ------------------------------------------------------------------------------------------------------


RULES = ("delta", "doubled delta", "scan")


class Rule:
    """A convolution and the delta rule or a state space behind it, over one session, whose inputs are random."""

    def __init__(self, sizes: StateSizes, kind: str, *, threads: int = 1, level: str = "auto") -> None:
        self.sizes, self.is_scan, self.doubles = sizes, kind == "scan", kind == "doubled delta"
        random = np.random.default_rng(3)
        heads = sizes.value_heads
        self.weights = random.standard_normal((sizes.channels, 1, sizes.taps)).astype(np.float32)
        self.decay, self.bias, self.skip = (random.standard_normal(heads).astype(np.float32) for _ in range(3))
        self.widths = {"in": sizes.channels, "conv": sizes.channels, "out": heads * sizes.value_dim}
        self.widths["gates"] = heads if self.is_scan else 2 * heads
        names: dict[str, Any] = {"input": "conv", "gate": "gates", "output": "out", "decay": "decay", "bias": "bias"}
        operations = (
            Given(output="in"),
            Convolve(input="in", output="conv", weights=("conv",), state=0, activation="silu"),
            SelectiveScan(**names, skip="skip", state=0)
            if self.is_scan
            else DeltaRule(**names, state=0, doubles=self.doubles),
        )
        steps = StepList(operations=operations, widths=self.widths, layers=(), hidden=1, vocabulary=1, states=(sizes,))
        tensors = {"conv": self.weights, "decay": self.decay, "bias": self.bias, "skip": self.skip}
        self.program = Program(
            library(),
            steps,
            LoadedTensors({name: torch.from_numpy(each) for name, each in tensors.items()}),
            {},
            trained_positions=1,
            identity=ProductIdentity.EXACT,
            threads=threads,
            level=level,
        )
        state = self.program.states(1)[0]
        assert state is not None
        self.memory = np.zeros(state.nbytes // 4, np.float32)
        self.position = 0

    def step(self, inputs: NDArray[np.float32], gates: NDArray[np.float32], *, keep: int | None = None) -> Any:
        """[n, value_heads · value_dim]; commits the first `keep`, or all."""
        count = len(inputs)
        is_short = self.position % CHUNK + count <= ROOM
        after = None if is_short else np.zeros_like(self.memory)
        span = StateSpan(0, count, self.position, self.memory.ctypes.data, None if after is None else after.ctypes.data)
        given = np.ascontiguousarray(inputs)
        native = NativeStep(
            given=given.ctypes.data, tokens=count, spans=ctypes.addressof(span), span_count=1, vocabulary=1
        )
        self.program.run(native, 0, 1)
        self.program.register("gates", count)[:] = gates
        self.program.run(native, 1)
        out = self.program.register("out", count).copy()
        kept = count if keep is None else keep
        if after is not None:
            self.memory = after
        else:
            self.program.settle(self.memory.ctypes.data, self.position % CHUNK, kept, count)
        self.position += kept
        return out

    def plain(self, inputs: NDArray[np.float32], gates: NDArray[np.float32]) -> Floats:
        """As the operations say it, token by token."""
        sizes, keys, values = self.sizes, self.sizes.key_dim, self.sizes.value_dim
        padded = np.concatenate([np.zeros((sizes.taps - 1, sizes.channels)), inputs.astype(np.float64)])
        matrices = np.zeros((sizes.value_heads, keys, values))
        outs = []
        for token, gate in enumerate(gates.astype(np.float64)):
            mixed = (padded[token : token + sizes.taps] * self.weights[:, 0].T).sum(0)
            mixed = mixed / (1 + np.exp(-mixed))
            outs.append((self._scan if self.is_scan else self._delta)(mixed, gate, matrices).reshape(-1))
        return np.array(outs)

    def _delta(self, mixed: Floats, gate: Floats, matrices: Floats) -> Floats:
        sizes, keys = self.sizes, self.sizes.key_dim
        queries, own_keys, own_values = np.split(mixed, np.cumsum([sizes.key_heads * keys] * 2))
        q, k = (self._of_heads(unit(each.reshape(-1, keys))) for each in (queries, own_keys))
        v = own_values.reshape(-1, sizes.value_dim)
        beta = (1 + self.doubles) / (1 + np.exp(-gate[: sizes.value_heads]))
        decay = np.exp(-np.exp(self.decay) * np.log1p(np.exp(gate[sizes.value_heads :] + self.bias)))
        matrices *= decay[:, None, None]
        matrices += np.einsum("hk,hv->hkv", k, beta[:, None] * (v - np.einsum("hk,hkv->hv", k, matrices)))
        found: Floats = np.einsum("hk,hkv->hv", q, matrices) / np.sqrt(keys)
        return found

    def _scan(self, mixed: Floats, gate: Floats, matrices: Floats) -> Floats:
        sizes = self.sizes
        width, keys = sizes.value_heads * sizes.value_dim, sizes.key_heads * sizes.key_dim
        values, own_keys, queries = np.split(mixed, [width, width + keys])
        q, k = (self._of_heads(each.reshape(-1, sizes.key_dim)) for each in (queries, own_keys))
        v, size = values.reshape(-1, sizes.value_dim), np.log1p(np.exp(gate + self.bias))
        matrices *= np.exp(-np.exp(self.decay) * size)[:, None, None]
        matrices += np.einsum("hk,hv->hkv", k, size[:, None] * v)
        found: Floats = np.einsum("hk,hkv->hv", q, matrices) + self.skip[:, None] * v
        return found

    def _of_heads(self, shared: Floats) -> Floats:
        return shared.repeat(self.sizes.value_heads // self.sizes.key_heads, 0)


def unit(x: Floats) -> Floats:
    found: Floats = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    return found


def inputs_for(rule: Rule, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(5)
    inputs, gates = (random.standard_normal((count, rule.widths[name])).astype(np.float32) for name in ("in", "gates"))
    return inputs, gates


def sizes_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int, taps: int) -> StateSizes:
    return StateSizes(
        layer=0,
        channels=2 * key_heads * key_dim + value_heads * value_dim,
        taps=taps,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


SIZES = (sizes_of(2, 4, 16, 16, 4), sizes_of(1, 3, 32, 48, 2), sizes_of(2, 2, 128, 128, 4), sizes_of(1, 1, 16, 144, 12))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_rule_is_that_of_its_paper_however_its_tokens_come(sizes: StateSizes, kind: str) -> None:
    rule = Rule(sizes, kind)
    inputs, gates = inputs_for(rule, 70)
    expected = rule.plain(inputs, gates)
    whole = rule.step(inputs, gates)
    assert np.abs(whole - expected).max() < ROUNDING * np.abs(expected).max()
    for level in library().levels():
        other, found, at = Rule(sizes, kind, threads=2, level=level), [], 0
        for count in (1, 3, 9, 1, 20, 8, 2, 1):
            if count < 9:  # a draft of which all or some is rejected
                other.step(inputs[at : at + 9][::-1], gates[at : at + 9][::-1], keep=0)
                found.append(other.step(*with_draft(inputs, gates, at, count), keep=count)[:count])
            else:
                found.append(other.step(inputs[at : at + count], gates[at : at + count]))
            at += count
        found.append(other.step(inputs[at:], gates[at:]))
        assert np.array_equal(np.concatenate(found), whole), level
        assert np.array_equal(other.memory, rule.memory), level


@pytest.mark.parametrize("kind", RULES)
def test_what_has_decayed_leaves_no_number_below_the_normal_ones(kind: str) -> None:
    """A processor may take a hundred times as long for those."""
    rule = Rule(SIZES[0], kind)
    inputs, gates = inputs_for(rule, 40)
    inputs[1:CHUNK] = 0.0  # nothing is added to what the first tokens have left
    lost = np.array([6.0, 11.0, 23.0, 80.0]) / np.exp(rule.decay)  # of each head, in the logarithm, by each token
    gates[:, -4:] = np.log(np.expm1(lost)) - rule.bias
    expected, found = rule.plain(inputs, gates), []
    for first, end in ((0, CHUNK), (CHUNK, 40)):
        found.append(rule.step(inputs[first:end], gates[first:end]))
        kept = np.abs(rule.memory[rule.memory != 0])
        assert kept.min() >= np.finfo(np.float32).tiny
    assert np.abs(np.concatenate(found) - expected).max() < ROUNDING * np.abs(expected).max()


def with_draft(
    inputs: NDArray[np.float32], gates: NDArray[np.float32], at: int, count: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """So many tokens, and others behind them: nine in all."""
    inputs, gates = (np.concatenate([each[at : at + count], each[: 9 - count]]) for each in (inputs, gates))
    return inputs, gates


# -- sessions ---------------------------------------------------------------------------------------------------------


def states(session: SessionKV) -> Tensor:
    assert isinstance(session.states, OpenChunkStates)
    return session.states.committed.memory.clone()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("hybrid", "weights"), [(DELTA, "auto"), (MAMBA, "auto"), further(DELTA, "int4")])
def test_logits_and_states_are_equal_to_the_bit_however_tokens_come(hybrid: str, weights: str, mode: Mode) -> None:
    forward = tiny_native(hybrid=hybrid, weights=weights, kv_type=KVType.FLOAT16)
    ids = ids_of(100)
    alone = Sessions(forward, Full(), mode=mode)
    expected = alone.logits(0, ids, [])
    for level in library().levels():
        other = tiny_native(hybrid=hybrid, weights=weights, kv_type=KVType.FLOAT16, threads=3, level=level)
        for cuts in (range(1, 100), [17, 33, 40, 41, 90]):
            again = Sessions(other, Full(), mode=mode)
            assert torch.equal(again.logits(0, ids, cuts), expected), (level, cuts)
            assert torch.equal(states(again.sessions[0]), states(alone.sessions[0]))
    crowd, found = Sessions(forward, Full(), Full(), Full(), mode=mode), []
    for first, end in pairwise([0, 3, 50, 51, 60, 100]):
        result, parts = crowd.step((0, ids_of(8, first)), (1, ids[first:end]), (2, ids_of(2, first + 1)))
        found.append(result.logits[parts[1]])
    assert torch.equal(torch.cat(found), expected)


def test_a_rejected_draft_leaves_no_byte_and_costs_no_second_run() -> None:
    forward, ids = tiny_native(hybrid=DELTA), ids_of(60)
    plain, drafted = Sessions(forward, Full()), Sessions(forward, Full())
    session = drafted.sessions[0]
    assert session.most_rejected == ROOM - CHUNK
    for at in range(60):
        plain.step((0, ids[at : at + 1]))
        session.stage(9)
        assert session.keepable(1) == 1
        context = drafted.context
        plan = StepPlan([session], context.geometry, context.pool, mask_dtype=torch.float32, ops=context.ops)
        forward.run(Step(np.array([ids[at], *ids_of(8, at)]), plan, range(9)))
        session.commit(at + 1)
        assert torch.equal(states(session), states(plain.sessions[0]))


def test_a_step_of_more_entries_than_there_is_room_for_is_kept_whole_or_not_at_all() -> None:
    forward, ids = tiny_native(hybrid=DELTA), ids_of(60)
    sessions, plain = Sessions(forward, Full()), Sessions(forward, Full())
    session = sessions.sessions[0]
    for each in (sessions, plain):
        each.step((0, ids[:5]))
    session.stage(12)
    assert (session.keepable(12), session.keepable(11)) == (12, 0)
    session.discard_staged()
    assert torch.equal(states(session), states(plain.sessions[0]))
    session.stage(3)
    with pytest.raises(InvariantViolated, match="no state was computed"):
        session.commit(8)


def test_a_session_goes_back_and_is_forked_behind_the_last_fold_without_a_prefill() -> None:
    forward, ids = tiny_native(hybrid=DELTA), ids_of(60)
    sessions = Sessions(forward, Full(), Full(), Full())
    first, second, _ = sessions.sessions
    expected = Sessions(forward, Full()).logits(0, [*ids[:42], *ids_of(10, 5)], [])[42:]
    sessions.logits(0, ids[:46], [])
    assert [first.kept(at) for at in (39, 40, 42, 46)] == [0, 40, 42, 46]
    second.copy_from(first, 42)
    assert second.length == 42
    assert torch.equal(sessions.logits(1, ids_of(10, 5), [1]), expected)
    prefixes = first.share(42)
    assert prefixes and prefixes[0].end == 42
    fork = SessionKV(Full(), sessions.context, 256, prefixes)
    fork.copy_from(first, 42)  # as the engine's thread does before the other goes on
    first.rewind(45)
    assert first.length == 45
    sessions.sessions.append(fork)
    assert torch.equal(sessions.logits(3, ids_of(10, 5), [4]), expected)
    saved = {name: [tuple(each.clone() for each in one) for one in some] for name, some in first.save().items()}
    loaded = sessions.sessions[2]
    loaded.load(45, saved)
    whole = Sessions(forward, Full()).logits(0, ids, [])[45:]
    assert torch.equal(sessions.logits(2, ids[45:], []), whole)
    assert torch.equal(sessions.logits(0, ids[45:], [2]), whole)


def test_states_count_in_the_bound_and_take_no_more_with_drafts() -> None:
    forward = tiny_native(hybrid=DELTA)
    geometry = forward.geometry(page_tokens=4, segment_tokens=16)
    state = geometry.state_layers[3]
    matrices, entries, inputs = 4 * 16 * 16, ROOM * (2 * 16 + 4 * 17), (3 + ROOM) * (2 * 2 + 4) * 16
    assert state.nbytes == -(-(matrices + entries + inputs) // 16) * 16 * 4
    sessions = Sessions(forward, Full())
    assert sessions.sessions[0].bound.sustained_bytes >= state.nbytes
    sessions.logits(0, ids_of(10), [])
    assert sessions.sessions[0].footprint().by_kind["states"] >= state.nbytes


# -- from a folder ----------------------------------------------------------------------------------------------------


OTHERS = (
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "nemotron_h",
)
CHANGES: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "granitemoehybrid": {"logits_scaling": 2.0},
    "falcon_h1": {"key_multiplier": 0.5, "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.9]},
}


def made(family: str) -> PreTrainedModel:
    return own_of(config_of(family, **CHANGES.get(family, {})))


def opened(folder: Path, **settings: Any) -> NativeForward:
    config = ModelConfig(
        model=str(folder), cache_dir=str(folder.parent / "cache"), backend="native", threads=1, **settings
    )
    forward = open_backend(config)
    assert isinstance(forward, NativeForward)
    return forward


@pytest.mark.usefixtures("trying_no_strategies")
@pytest.mark.parametrize("family", ["qwen3_5_text", *map(further, OTHERS[:-1]), OTHERS[-1]])
def test_a_folder_of_safetensors_is_served_natively(family: str, tmp_path: Path) -> None:
    ids = text(60)
    # Of int8: a number between two codes may take the other one here.
    for stored, weights, most in (("float32", "auto", 2e-4), ("bfloat16", "auto", 2e-4), ("float32", "int8", 5e-3)):
        made(family).to(getattr(torch, stored)).save_pretrained(tmp_path / stored)
        own = made(family)
        with torch.no_grad():  # and not of what follows from its configuration
            for parameter in own.parameters():
                parameter.copy_(parameter.to(getattr(torch, stored)))
        if weights == "int8":
            to_bytes(own)
        with torch.inference_mode():
            expected = own(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        forward = opened(tmp_path / stored, weights=weights, kv_dtype="float32")
        assert forward.facts.backend == "native" and forward.facts.layers == own.config.num_hidden_layers
        found = Sessions(forward, Full()).logits(0, ids, [20, 21])
        assert (found - expected).abs().max() <= most * expected.abs().max(), (stored, weights)
        forward.program.close()


def to_bytes(model: PreTrainedModel) -> None:
    """Round the matrices that are asked to be, as they are rounded: 32 inputs to a scale of 16 bits."""
    small = (
        "in_proj_a",
        "in_proj_b",
        ".a_proj",
        ".b_proj",
        "mlp.gate.",
        "mixer.gate.",
        "router",
        "shared_expert_gate",
        "conv1d",
        "conv.conv",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not any(part in name for part in small):
                blocks = parameter.view(-1, 32) if parameter.shape[-1] % 32 == 0 else padded(parameter)
                scales = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
                rounded = (blocks / scales.clamp_min(1e-12)).round() * scales
                parameter.copy_(rounded.view(*parameter.shape[:-1], -1)[..., : parameter.shape[-1]])


def padded(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[-1] % 32)).view(-1, 32)
