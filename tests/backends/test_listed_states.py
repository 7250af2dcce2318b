"""Hybrids, Gemma 4 and latent attention by their list, in kernels: transformers' logits, and every law of states.

Interpreted, products and attention are plain; on a GPU all is kernels, in recorded steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from transformers import Gemma4TextConfig, PretrainedConfig, PreTrainedModel

from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import try_listed
from inference_engine.backends.twin import model_class
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kernels.fused import PLAIN, Fused
from inference_engine.kernels.ops import DeviceOps, open_ops
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import ModelFacts
from tests.admissions import admitted_once, traits_of
from tests.backends import test_gemma4 as gemma4
from tests.backends import test_hybrids as hybrids
from tests.backends import test_latent_families as latents
from tests.backends.small_families import HISTORIES, continued, continues_as_transformers, ids_of
from tests.further import further, interpreted
from tests.kernels.own_process import run_with_triton
from tests.tiny import SMALL, TRAINED_POSITIONS, VOCABULARY

MOST = 2e-4  # of the largest logit: sums in another order
MIXTURES = ("qwen3_5_moe_text", "qwen3_next", "lfm2_moe")
MADE = {"olmo_hybrid": {"linear_key_head_dim": 16, "linear_value_head_dim": 32}}
GRANITES = ("granitemoehybrid", "granitemoehybrid unrotated")
SPACES = (*GRANITES, "bamba", "falcon_h1", "nemotron_h")
# Of Gemma 4, by their names here: what is published, and layers that read entries whose values are keys.
GEMMAS = {**gemma4.KINDS, "read": {**gemma4.SMALL_E, "attention_k_eq_v": True, "num_global_key_value_heads": 1}}
# The twins of these have rotated parts of 4 numbers.
LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def ops() -> DeviceOps:
    if torch.cuda.is_available():
        return open_ops("auto", device())
    from inference_engine.kernels.triton.state_rules import TritonStates

    def opened(*, is_invariant: bool) -> Fused:
        return replace(PLAIN, states=TritonStates(is_invariant=is_invariant))

    return DeviceOps(
        attends_together=True,
        open_fused=partial(opened, is_invariant=False),
        open_invariant=partial(opened, is_invariant=True),
    )


def listed(own: PreTrainedModel, given: DeviceOps | None = None, *, is_invariant: bool = False) -> TorchForward:
    admitted = admitted_once(own.config)
    config = copy.deepcopy(own.config)
    config._attn_implementation = ATTENTION
    taken = type(own)(config).to(own.dtype).eval()
    taken.load_state_dict(own.state_dict())
    facts = ModelFacts(
        model_id=config.model_type,
        vocab_size=VOCABULARY,
        trained_positions=TRAINED_POSITIONS,
        device=str(device()),
        dtype="float32",
        refused_strategies=admitted.refused,
    )
    seam, own_ops = Seam(taken.to(device()), admitted.traits), given or ops()
    if is_invariant:
        own_ops = replace(own_ops, attend_ragged=own_ops.attend_invariant, attends_in_one_order=True)
    executor = OpListExecutor(seam, own_ops.open_invariant() if is_invariant else own_ops.open_fused())
    records = device().type == "cuda"
    return TorchForward(seam, facts, device(), ops=own_ops, listed=executor, records_graphs=records)


def config_of(family: str) -> PretrainedConfig:
    if family in LATENTS:
        return latents.config_of(family)
    return Gemma4TextConfig(**GEMMAS[family]) if family in GEMMAS else hybrids.config_of(family)


def tried(*families: str) -> None:
    for family in families:
        config = config_of(family)
        kind = model_class(config)
        for is_invariant in (False,) if family in LATENTS else (False, True):
            traits = traits_of(config, kind)
            difference = try_listed(kind, config, traits, ops=ops(), device=device(), is_invariant=is_invariant)
            assert difference < MOST, (family, is_invariant)


def compare_delta() -> None:
    tried("qwen3_5_text")


def compare_convolutions() -> None:
    tried("lfm2")


def compare_scans() -> None:
    tried(*SPACES[:2])


def compare_more_scans() -> None:
    tried(*SPACES[2:])


def compare_mixtures() -> None:
    tried(*MIXTURES)


def compare_normed() -> None:
    tried("olmo_hybrid")


def compare_gemmas() -> None:
    tried(*GEMMAS)


def compare_latents() -> None:
    tried(*LATENTS)


def compare_products() -> None:
    """What is tried at the start of weights of a model's own."""
    for family in ("qwen3_5_text", "granitemoehybrid", "mixture"):
        executor = listed(hybrids.own_of(config_of(family))).listed
        assert executor is not None
        executor.check()


def compare_laws() -> None:
    own = hybrids.own_of(hybrids.config_of("qwen3_5_text"))
    for is_invariant in (False, True):
        hybrids._SERVED["qwen3_5_text"] = own, listed(own, is_invariant=is_invariant)
        for kept in (0, 1, 3):
            hybrids.test_rejected_tokens_leave_the_state_as_if_they_had_never_been_staged(kept)
        hybrids.test_a_step_too_long_to_be_run_again_is_kept_whole_or_not_at_all()
        hybrids.test_a_fork_reads_the_entries_of_its_parent_and_has_a_state_of_its_own()
        hybrids.test_a_copy_has_a_state_of_its_own_and_none_of_a_parent_that_has_gone_on()
        hybrids.test_states_that_no_fork_borrows_are_given_back()
        hybrids.test_what_was_saved_dropped_or_forgotten_goes_on_from_there()
        hybrids.test_entries_that_are_computed_again_have_states_of_their_own_meanwhile()


def compare_one_order() -> None:
    """Cut anywhere, beside others or alone: where that is promised, the same bits. Interpreted products promise it for
    few tokens."""
    from tests.laws.variants import text

    forward = listed(hybrids.own_of(hybrids.config_of("qwen3_5_text")), open_ops("triton", device()), is_invariant=True)
    sessions, ids = hybrids.Sessions(forward), text(28)
    sizes = (3, 24) if device().type == "cuda" else (3, 12, 9)
    alone, cut, beside, other = (sessions.open() for _ in range(4))
    expected = sessions.feed(alone, ids)
    assert torch.equal(sessions.feed(cut, ids, *sizes), expected)
    found = []
    for first in range(0, 28, 7):
        found += sessions.step((other, text(5, seed=first)), (beside, ids[first : first + 7]))[1:]
    assert torch.equal(torch.cat(found), expected)
    for kv in (cut, beside):
        assert all(torch.equal(*pair) for pair in zip(hybrids.states(kv), hybrids.states(alone), strict=True))


def compare_sessions() -> None:
    """In a batch, with drafts and without, through an engine, forks and second turns, too."""
    of_gpu = ("qwen3_5_text", "olmo_hybrid", "lfm2", *MIXTURES, *SPACES, *GEMMAS, *LATENTS)
    for family in of_gpu if torch.cuda.is_available() else ("qwen3_5_text", "mixture", "deepseek_v2"):
        config = hybrids.config_of(family, **MADE[family]) if family in MADE else config_of(family)
        own = hybrids.own_of(config)
        for drafts in (True, False) if torch.cuda.is_available() else (True,):
            continues_as_transformers(own, listed(own), drafts=drafts, count=24 if torch.cuda.is_available() else 6)


def compare_ahead() -> None:
    """Steps that are launched before the tokens of the one before are known, over several chunks."""
    own = hybrids.own_of(hybrids.config_of("qwen3_5_text"))
    histories = HISTORIES[1:2] * 2
    with Engine(listed(own), EngineConfig(**{**SMALL, "overlap": "on"})) as engine:
        sessions = [engine.create_session().session_id for _ in histories]
        for session, history in zip(sessions, histories, strict=True):
            engine.append(session, history)
        with ThreadPoolExecutor(len(sessions)) as pool:
            got = list(pool.map(lambda session: ids_of(engine, session, 20), sessions))
    assert got == [continued(own, history, 20) for history in histories]


@pytest.mark.parametrize(
    "compare",
    [
        compare_convolutions,
        compare_latents,
        *map(interpreted, (compare_delta, compare_gemmas)),
        *map(further, (compare_scans, compare_more_scans, compare_mixtures, compare_normed, compare_products)),
        *map(further, (compare_laws, compare_one_order, compare_sessions, compare_ahead)),
    ],
    ids=lambda compare: compare.__name__,
)
def test_lists_with_states_in_kernels_are_what_transformers_is(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
