"""Hybrid models: layers that keep a recurrent state of the history beside those that keep entries of its tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Step
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.twin import admit_config, model_class
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import (
    BackendError,
    ConfigError,
    InvariantViolated,
    ModelError,
    NoCapacity,
    NonFiniteLogits,
)
from inference_engine.kv.archives.latent import latent_layers
from inference_engine.kv.geometry import UNROTATED
from inference_engine.kv.parts.recurrent import RecurrentStates
from inference_engine.kv.plan import StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.views import State
from inference_engine.models.mixers import SessionMixer
from inference_engine.types import GenerateParams, Mode
from laboratory.training.capture import require_stored_keys
from laboratory.training.latent import calibrate, measure
from tests.admissions import admitted_once
from tests.backends.small_families import (
    HISTORIES,
    continued,
    continues_as_transformers,
    forward_of,
    ids_of,
    own_model,
    stays_within_its_bounds,
)
from tests.facade import session_of
from tests.further import further, further_test
from tests.laws.variants import generate, text
from tests.tiny import PAGES, SMALL, TRAINED_POSITIONS, VOCABULARY

FULL, LINEAR = "full_attention", "linear_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
THREE_TO_ONE: dict[str, Any] = {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}
DELTA: dict[str, Any] = {
    **SIZES,
    **THREE_TO_ONE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA: dict[str, Any] = {
    **SIZES,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE: dict[str, Any] = {
    **MAMBA,
    **THREE_TO_ONE,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 32,
}
CONVOLUTIONS: dict[str, Any] = {**SIZES, "layer_types": ["conv", "conv", FULL, "conv"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "head_dim": 16},
    "qwen3_5_moe_text": {**DELTA, **MIXTURE, "head_dim": 16, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**DELTA, **MIXTURE, "head_dim": 16, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**SIZES, **THREE_TO_ONE},
    "granitemoehybrid": {**GRANITE, "position_embedding_type": "rope"},
    "granitemoehybrid unrotated": {**GRANITE, "position_embedding_type": None},
    "bamba": {**MAMBA, "attn_layer_indices": [2]},
    "lfm2": {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm3": {
        **SIZES,
        "layer_types": ["conv", "sliding_attention", FULL, "conv"],
        "head_dim": 16,
        "sliding_window": 24,
    },
    "lfm2_moe": {**CONVOLUTIONS, **MIXTURE, "num_dense_layers": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "nemotron_h": {
        **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
}
FIRST = ("qwen3_5_text", "lfm2")
each_family = pytest.mark.parametrize("family", [name if name in FIRST else further(name) for name in FAMILIES])
COUNT = 64
# Relative to the largest logit: sums in another order.
ROUNDING = 2e-4


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[family.partition(" ")[0]](**{**FAMILIES[family], **changes})


def own_of(config: PretrainedConfig) -> PreTrainedModel:
    return own_model(model_class(config), config)


_SERVED: dict[str, tuple[PreTrainedModel, TorchForward]] = {}


def served(family: str) -> tuple[PreTrainedModel, TorchForward]:
    if family not in _SERVED:
        own = own_of(config_of(family))
        _SERVED[family] = own, forward_of(own, admitted_once(own.config))
    return _SERVED[family]


class Sessions:
    """Sessions of one model, step by step."""

    def __init__(self, forward: TorchForward) -> None:
        self.forward = forward
        self.context = forward.open(forward.geometry(**PAGES), 2**24)

    def open(self, strategy: str = "full") -> SessionKV:
        return SessionKV(parse_strategy(strategy), self.context, 256)

    def step(self, *blocks: tuple[SessionKV, Sequence[int]], keep: int | None = None) -> list[Tensor]:
        """Logits [n, V] of each block; `keep`: commit so many tokens of each."""
        for kv, ids in blocks:
            kv.stage(len(ids))
        context, dtype = self.context, self.forward.seam.dtype
        plan = StepPlan([kv for kv, _ in blocks], context.geometry, context.pool, mask_dtype=dtype, ops=context.ops)
        packed = np.concatenate([np.array(ids, dtype=np.int64) for _, ids in blocks])
        logits = self.forward.run(Step(packed, plan, range(len(packed)))).logits.cpu()
        for kv, ids in blocks:
            kv.commit(kv.length + (len(ids) if keep is None else keep))
            kv.check()
        return [logits[span.real] for span in plan.spans]

    def feed(self, kv: SessionKV, ids: Sequence[int], *sizes: int) -> Tensor:
        """Logits of all tokens, in steps of these sizes; the rest one by one."""
        found, at = [], 0
        for size in (*sizes, *[1] * (len(ids) - sum(sizes))):
            found += self.step((kv, ids[at : at + size]))
            at += size
        return torch.cat(found)


def whole(own: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = own(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return logits


def difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


def states(kv: SessionKV) -> list[Tensor]:
    assert kv.states is not None
    return [tensor.clone() for layer in kv.states.committed.views.values() for tensor in layer]


# -- as transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        (family, drafts) if family in FIRST and drafts else further(family, drafts)
        for family in FAMILIES
        for drafts in (False, True)
    ],
)
def test_sessions_in_a_batch_their_forks_and_second_turns_continue_as_transformers_does(
    family: str, drafts: bool
) -> None:
    own, forward = served(family)
    continues_as_transformers(own, forward, drafts=drafts, count=COUNT)


@each_family
def test_every_strategy_is_admitted_serves_it_and_stays_within_its_bound(family: str) -> None:
    _, forward = served(family)
    state_bytes = sum(state.nbytes for state in forward.geometry(**PAGES).state_layers.values())
    assert state_bytes > 0 and not forward.facts.refused_strategies
    last = max(number for number, read in enumerate(forward.seam.reads) if read is not None)
    stays_within_its_bounds(
        forward,
        (
            "sink_window:sink=2,window=20",
            f"layer_window:sink=2,window=8,full_layers={last}",
            "full:codec=int8,exact_window=20",
            "gather:block=4,sink=4,window=16,budget=48",
            "tiered:block=8,sink=4,window=16,budget=48,resident_tokens=20",
            "restored:sink=4,window=16",
        ),
        more_than=state_bytes,
    )


@further_test
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "lfm2", "olmo_hybrid", "falcon_h1"])
def test_a_latent_is_calibrated_for_the_layers_with_attention(family: str) -> None:
    own, forward = served(family)
    layers = latent_layers(forward.geometry(**PAGES))
    require_stored_keys(own, layers=layers)
    texts = [torch.tensor([text(120, seed=seed) for seed in range(first, first + 4)]) for first in (0, 4)]
    codec = calibrate(own, texts[:1], layers=layers, bytes_per_token=90 * len(layers), group_layers=1)
    assert measure(own, texts[1:], codec).overall < 0.02
    with Engine(forward, EngineConfig(**SMALL), latent=codec) as engine:
        exact, restored = (
            engine.create_session(strategy=parse_strategy(said)).session_id
            for said in ("full", f"restored:source=latent,sink=2,window=16,bytes_per_token={codec.bytes_per_token}")
        )
        for session in (exact, restored):
            engine.append(session, HISTORIES[2])
        exactly, nearly = (generate(engine, session, 1)[0] for session in (exact, restored))
        assert exactly[0] == nearly[0] and exactly[1] == pytest.approx(nearly[1], abs=0.1)


@further_test
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_in_bfloat16_it_is_no_farther_from_float32_than_transformers(family: str) -> None:
    """KL divergence of next tokens to float32, in chunks and token by token as a session decodes."""
    exact, _ = served(family)
    own = copy.deepcopy(exact).to(torch.bfloat16)
    forward = forward_of(own, admitted_once(own.config))
    ours: list[float] = []
    theirs: list[float] = []
    for seed in range(4):
        ids = text(150, seed=seed)
        expected = whole(exact, ids).log_softmax(-1)
        sessions = Sessions(forward)
        found = sessions.feed(sessions.open(), ids, 48, 48, 16).float().log_softmax(-1)
        own_found = whole(own, ids).log_softmax(-1)
        for logs, into in ((found, ours), (own_found, theirs)):
            into.append(float((expected.exp() * (expected - logs)).sum(-1).mean()))
    assert np.mean(ours) <= 1.1 * np.mean(theirs)


# -- what a session holds ---------------------------------------------------------------------------------------------


@each_family
def test_a_state_goes_on_in_steps_of_any_size_beside_other_sessions(family: str) -> None:
    own, forward = served(family)
    sessions, ids = Sessions(forward), text(100)
    expected = whole(own, ids)
    has_windows = any(layer.native_window for layer in forward.seam.layers)  # then steps end with segments
    sizes = (7, 9, 16) if has_windows else (7, 40, 3)
    assert difference(sessions.feed(sessions.open(), ids, *sizes), expected) < ROUNDING
    ours, other, found = sessions.open(), sessions.open(), []
    for first in range(0, 100, 8):
        found += sessions.step((other, text(4, seed=first)), (ours, ids[first : first + 8]))[1:]
    assert difference(torch.cat(found), expected) < ROUNDING


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_rejected_tokens_leave_the_state_as_if_they_had_never_been_staged(kept: int) -> None:
    own, forward = served("qwen3_5_text")
    sessions, ids = Sessions(forward), text(80)
    drafted, plain = sessions.open(), sessions.open()
    for kv in (drafted, plain):
        sessions.feed(kv, ids[:50], 50)
    sessions.step((drafted, [*ids[50 : 50 + kept], *text(5 - kept, seed=9)]), keep=kept)
    if kept:
        sessions.step((plain, ids[50 : 50 + kept]))
    for one, other in zip(states(drafted), states(plain), strict=True):
        assert difference(one, other) < ROUNDING if kept else torch.equal(one, other)
    assert difference(sessions.feed(drafted, ids[50 + kept :]), whole(own, ids)[50 + kept :]) < ROUNDING


def test_a_step_too_long_to_be_run_again_is_kept_whole_or_not_at_all() -> None:
    sessions, ids = Sessions(served("qwen3_5_text")[1]), text(100)
    kv = sessions.open()
    kv.stage(90)
    assert (kv.keepable(90), kv.keepable(89)) == (90, 0)
    kv.discard_staged()
    before = [tensor for tensor in states(kv) if tensor.any()]
    assert not before
    with pytest.raises(InvariantViolated, match="89 of 90 tokens"):
        sessions.step((kv, ids[:90]), keep=89)


def test_the_states_of_a_prefill_in_segments_are_those_of_a_whole_one_to_the_bit() -> None:
    """Chunks end with segments, whose grid begins at position 0 and not where a call does."""
    forward = served("qwen3_5_text")[1]
    context = forward.open(forward.geometry(**PAGES), 2**24)
    mixers = [each for each in forward.seam.model.modules() if isinstance(each, SessionMixer)]
    hidden = torch.randn(1, 107, 64, generator=torch.Generator().manual_seed(1))

    def run(*sizes: int) -> State:
        part = RecurrentStates.reserve(context, replays=False)
        assert part is not None
        at = 0
        with torch.inference_mode():
            for size in (*sizes, 107 - sum(sizes)):
                positions = np.arange(at, at + size)
                part.stage(positions, np.zeros(size, dtype=np.bool_))
                for mixer in mixers:
                    part.mix(mixer.number, mixer._mix, hidden[:, at : at + size])
                part.commit(at, at + size, positions[:0])
                at += size
        found = tuple(tensor.clone() for layer in part.committed.views.values() for tensor in layer)
        part.release()
        return found

    def are_equal(one: State, other: State) -> bool:
        return all(torch.equal(*pair) for pair in zip(one, other, strict=True))

    expected = run()
    assert are_equal(run(16, 32, 48), expected)
    # A cut within a segment changes the bits once, wherever calls begin behind it.
    cut = run(40)
    assert are_equal(run(40, 8), cut) and are_equal(run(16, 24, 8, 16), cut)


def test_a_fork_reads_the_entries_of_its_parent_and_has_a_state_of_its_own() -> None:
    own, forward = served("qwen3_5_text")
    sessions, ids = Sessions(forward), text(80)
    other = [*ids[:40], *text(40, seed=5)]
    expected, expected_of_fork = whole(own, ids), whole(own, other)
    parent = sessions.open()
    sessions.feed(parent, ids[:40], 40)
    before = sessions.context.pool.reserved_bytes
    prefixes = parent.share(40)
    fork = SessionKV(Full(), sessions.context, 256, prefixes)
    fork.copy_from(parent, 40)  # as the engine's thread does before the parent goes on
    assert (fork.base, fork.length) == (40, 40) and fork.shared_bytes
    assert parent.share(40)[0].states is prefixes[0].states  # one copy for all forks there
    assert difference(sessions.feed(parent, ids[40:60]), expected[40:60]) < ROUNDING
    assert difference(sessions.feed(fork, other[40:60]), expected_of_fork[40:60]) < ROUNDING
    # Both go back to where the prefix ends, whatever made them forget the rest.
    fork.drop()
    fork.reserve()
    parent.forget()
    assert fork.length == parent.length == 40
    assert difference(sessions.feed(fork, other[40:60]), expected_of_fork[40:60]) < ROUNDING
    assert difference(sessions.feed(parent, ids[40:60]), expected[40:60]) < ROUNDING
    # A fork of the fork at that end needs no copy; behind it, the parent's state has gone on.
    assert fork.share(40)[0].states is prefixes[0].states
    assert (parent.kept(40), parent.kept(50), parent.kept(60)) == (40, 0, 60)
    assert not parent.share(50)
    parent.release()
    assert difference(sessions.feed(fork, other[60:]), expected_of_fork[60:]) < ROUNDING
    fork.release()
    assert sessions.context.pool.reserved_bytes < before and not sessions.context.pool.reserved_bytes


def test_a_copy_has_a_state_of_its_own_and_none_of_a_parent_that_has_gone_on() -> None:
    own, forward = served("qwen3_5_text")
    sessions, ids = Sessions(forward), text(60)
    other = [*ids[:40], *text(20, seed=5)]
    parent, copied, late = (sessions.open() for _ in range(3))
    sessions.feed(parent, ids[:40], 40)
    copied.copy_from(parent, 40)
    assert difference(sessions.feed(parent, ids[40:]), whole(own, ids)[40:]) < ROUNDING
    assert difference(sessions.feed(copied, other[40:]), whole(own, other)[40:]) < ROUNDING
    late.copy_from(parent, 40)  # which has the entries, and no state after 40 tokens
    assert (parent.kept(40), parent.kept(60), late.length) == (0, 60, 0)


def test_sessions_that_begin_alike_take_what_another_has_there_where_its_state_is() -> None:
    own, forward = served("qwen3_5_text")
    common, ends = text(96, seed=7), [text(30, seed=seed) for seed in range(4)]
    with Engine(forward, EngineConfig(**{**SMALL, "share_prefixes": "owner"})) as engine:
        taken = engine.metrics.shared_prefix_tokens._value
        sessions = [engine.create_session().session_id for _ in ends[:3]]
        for session, end in zip(sessions, ends, strict=False):
            engine.append(session, [*common, *end])
        with ThreadPoolExecutor(len(sessions)) as pool:  # the first prefills the beginning, and the others wait for it
            got = list(pool.map(lambda session: ids_of(engine, session, 8), sessions))
        assert got == [continued(own, [*common, *end], 8) for end in ends[:3]]
        assert taken.get() == 2 * len(common)
        late = engine.create_session().session_id
        engine.append(late, [*common, *ends[3]])  # no state after the beginning is there any more
        assert ids_of(engine, late, 8) == continued(own, [*common, *ends[3]], 8)
        assert taken.get() == 2 * len(common)
        whole_history = [*common, *ends[0], *got[0]]
        longer = engine.create_session().session_id
        engine.append(longer, [*whole_history, 5, 6])
        assert ids_of(engine, longer, 8) == continued(own, [*whole_history, 5, 6], 8)
        assert taken.get() == 2 * len(common) + len(whole_history) - 1


def test_a_closed_session_leaves_its_state_and_nothing_that_it_lent() -> None:
    own, forward = served("qwen3_5_text")
    with Engine(forward, EngineConfig(**{**SMALL, "share_prefixes": "owner"})) as engine:
        parent, common = engine.create_session().session_id, text(96, seed=7)
        engine.append(parent, common)
        history = [*common, *ids_of(engine, parent, 8)]
        fork = engine.fork_session(parent).session_id
        assert ids_of(engine, fork, 8) == continued(own, history, 8)
        for session in (fork, parent):
            engine.close_session(session)
        assert (engine.info().kv_reserved_bytes, engine.prefix_bytes_of("") > 0) == (0, True)
        late = engine.create_session().session_id
        engine.append(late, [*history, 5, 6])
        assert ids_of(engine, late, 8) == continued(own, [*history, 5, 6], 8)
        assert engine.metrics.kept_prefix_tokens._value.get() == len(history) - 1


def test_states_that_no_fork_borrows_are_given_back() -> None:
    sessions = Sessions(served("qwen3_5_text")[1])
    parent, pool = sessions.open(), sessions.context.pool
    sessions.feed(parent, text(41)[:40], 40)
    before = pool.reserved_bytes
    assert parent.share(40) and pool.reserved_bytes > before
    sessions.feed(parent, text(41)[40:])
    assert pool.reserved_bytes == before
    assert parent.share(41)
    parent.release()
    assert not pool.reserved_bytes


def test_what_was_saved_dropped_or_forgotten_goes_on_from_there() -> None:
    own, forward = served("qwen3_5_text")
    sessions, ids = Sessions(forward), text(60)
    kv = sessions.open()
    sessions.feed(kv, ids[:40], 40)
    saved = {name: [tuple(one.clone() for one in each) for each in some] for name, some in kv.save().items()}
    loaded = sessions.open()
    loaded.load(40, saved)
    expected = whole(own, ids)
    assert difference(sessions.feed(loaded, ids[40:]), expected[40:]) < ROUNDING
    kv.drop()
    kv.reserve()
    loaded.forget()
    for again in (kv, loaded):
        assert again.length == 0
        assert difference(sessions.feed(again, ids, 60), expected) < ROUNDING


def test_entries_that_are_computed_again_have_states_of_their_own_meanwhile() -> None:
    """With `restored` and no latents old entries are recomputed from position 0, and the state is that of the end."""
    _, forward = served("qwen3_5_text")
    sessions, ids = Sessions(forward), text(70)
    before: list[Tensor] = []
    kv = sessions.open("restored:sink=4,window=16")
    while kv.length < 60:
        assert kv.wake(60)
        while kv.pending_replay:
            first = kv.next_position
            count = min(kv.room(), kv.pending_replay)
            kv.stage(count)
            plan = StepPlan([kv], sessions.context.geometry, sessions.context.pool, mask_dtype=torch.float32)
            forward.run(Step(np.array(ids[first : first + count]), plan, range(0)))
            kv.commit(first + count)
        sessions.step((kv, ids[kv.length : kv.length + min(kv.room(), 60 - kv.length)]))
        before = states(kv)
        kv.idle()
    assert all(torch.equal(one, other) for one, other in zip(states(kv), before, strict=True))
    assert kv.footprint().total_bytes <= kv.bound.peak_bytes


def test_states_are_in_the_bound_and_a_pool_that_is_too_small_for_them_says_how_many_bytes() -> None:
    _, forward = served("qwen3_5_text")
    geometry = forward.geometry(**PAGES)
    state_bytes = sum(state.nbytes for state in geometry.state_layers.values())
    context = forward.open(geometry, 2**24)
    kv = SessionKV(Full(), context, 64)
    assert kv.bound.sustained_bytes == 64 * geometry.entry_bytes + state_bytes == context.pool.reserved_bytes
    sessions = Sessions(forward)
    sessions.context = context
    sessions.feed(kv, text(64), 64)
    assert kv.footprint().by_kind["states"] == state_bytes
    assert kv.footprint().total_bytes == kv.bound.sustained_bytes
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        assert engine.info().recurrent_state_bytes == state_bytes
    small = forward.open(geometry, state_bytes)
    with pytest.raises(NoCapacity) as refusal:
        SessionKV(Full(), small, 64)
    assert refusal.value.metadata["needed_bytes"] == str(64 * geometry.entry_bytes + state_bytes)
    with pytest.raises(ConfigError, match=str(16 * geometry.entry_bytes + state_bytes)):
        Engine(forward, EngineConfig(**{**SMALL, "kv_bytes": state_bytes}))


def test_a_session_whose_state_is_not_finite_fails_alone_and_recovers() -> None:
    own, forward = served("qwen3_5_text")
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        broken, sound = (engine.create_session().session_id for _ in range(2))
        for session in (broken, sound):
            engine.append(session, HISTORIES[0])
        first, _ = (ids_of(engine, session, 4) for session in (broken, sound))
        kv = session_of(engine, broken).kv
        assert kv.states is not None
        next(iter(kv.states.committed.views.values()))[1].fill_(float("nan"))
        with pytest.raises(NonFiniteLogits):
            ids_of(engine, broken, 4)
        expected = continued(own, HISTORIES[0] + first, 8)
        assert ids_of(engine, sound, 8) == expected
        assert ids_of(engine, broken, 8) == expected  # its entries and its state were computed again


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_5_text", {"layer_types": [LINEAR, LINEAR, "minimax_attention", FULL]}, "minimax_attention"),
        ("qwen3_5_text", {"layer_types": [LINEAR] * 4}, "no layer with attention"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) is no multiple"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 10**6}, "linear_conv_kernel_dim is 1000000"),
        ("lfm2", {"conv_L_cache": 10**6}, "conv_L_cache is 1000000"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_groups"),
    ],
)
def test_what_no_layer_can_be_is_refused_with_the_model_type_and_the_field(
    family: str, changes: dict[str, Any], said: str
) -> None:
    config = config_of(family)
    for name, value in changes.items():
        object.__setattr__(config, name, value)  # as a file may have it, whatever transformers checks
    with pytest.raises(ModelError, match=said) as refusal:
        admit_config(config)
    assert family.partition(" ")[0] in str(refusal.value)


def test_a_file_that_names_another_number_of_layers_is_refused() -> None:
    config = config_of("qwen3_5_text")
    object.__setattr__(config, "layer_types", [LINEAR, FULL])
    with pytest.raises(ModelError, match="layer_types names 2 layers, the model has 4"):
        admit_config(config)


def test_a_layer_whose_cache_has_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a wrong name the module would begin with no state at every step."""
    own = own_of(config_of("lfm2"))
    module = type(own.model.layers[0].conv)
    forward = module.forward

    def renamed(self: Any, hidden_states: Tensor, past_key_values: Any = None, cache: Any = None) -> Tensor:
        out: Tensor = forward(self, hidden_states, past_key_values=cache)
        return out

    monkeypatch.setattr(module, "forward", renamed)
    with pytest.raises(ModelError, match="keeps its state elsewhere than in the cache"):
        admit_config(config_of("lfm2"))


def test_admission_sees_a_state_that_is_lost_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = SessionMixer._mix
    monkeypatch.setattr(SessionMixer, "_mix", lambda self, hidden, _before: mix(self, hidden, None))
    with pytest.raises(ModelError, match="is not served rightly"):
        admit_config(config_of("qwen3_5_text"))


def test_attention_without_rotation_is_found_and_nothing_else_may_be_without() -> None:
    assert [trait.rotary for trait in admitted_once(config_of("granitemoehybrid unrotated")).traits] == [UNROTATED] * 4
    rotated = admitted_once(config_of("granitemoehybrid")).traits
    assert rotated[3].rotary == "default"


@pytest.mark.parametrize("family", ["qwen3_5_text", further("granitemoehybrid unrotated")])
def test_an_endless_session_goes_on_past_the_trained_positions(family: str) -> None:
    _, forward = served(family)
    history, windowed = text(TRAINED_POSITIONS + 60), parse_strategy("sink_window:sink=2,window=20")
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        at_once, in_turns = (engine.create_session(strategy=windowed).session_id for _ in range(2))
        engine.append(at_once, history)
        for first in range(0, len(history), 150):
            engine.append(in_turns, history[first : first + 150])
            list(engine.generate(in_turns, GenerateParams(max_tokens=0)))
        assert ids_of(engine, at_once, 8) == ids_of(engine, in_turns, 8)


def test_equal_bits_in_any_batch_are_not_promised() -> None:
    forward = forward_of(own_of(config := config_of("qwen3_5_text")), admitted_once(config))
    forward.facts = replace(forward.facts, mode=Mode.FIXED_SHAPE)
    with pytest.raises(BackendError, match=r"qwen3_5_text.*determinism=off"):
        Engine(forward, EngineConfig(**SMALL))
