"""A model in two parts gives the tokens of the whole one: every family with a list, and what sessions do between steps.

The identity is float32, where sums in another order draw no other token here. What neither may be is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from inference_engine.backends import torch_loading
from inference_engine.backends.base import Forward
from inference_engine.backends.ranks.causal_plan import CausalPlan
from inference_engine.backends.ranks.loading import STRATEGIES
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.compose import DLMRestoredVerifier, admit, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, ConfigError, EngineStalled, InvalidArgument, KakeyaError
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kv import plan
from inference_engine.kv.strategies import parse_strategy, strategy_names
from inference_engine.models import load_model
from inference_engine.models.seam import ATTENTION
from inference_engine.types import Finished, GenerateParams, Mode, Sampling
from kv_cache_proposer.ngram import NgramDrafter
from tests.backends.test_families import SIZES, write_model
from tests.facade import copies_known, drop_entries, save_copies
from tests.further import further
from tests.kept import after_a_kill, keeping, saved
from tests.laws.variants import drain, generate, same, text, tokens
from tests.models.test_quantised_checkpoints import LAYOUTS, written
from tests.parallel.in_threads import InThread, ThreadGroup, two_ranks
from tests.tiny import SMALL, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("trying_no_strategies")

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "smollm3": {},
    "phi3": {"pad_token_id": None},
    "longrope": {
        "model_type": "phi3",
        "pad_token_id": None,
        "original_max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [1]},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "head_dim": 16, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
}
GATHER = "gather:block=4,sink=4,window=16,budget=32"
# A bias of each product, a table of angles by length, norms and windows of its own, experts beside a shared one.
FIRST = ("llama", "longrope", "gemma3_text", "qwen2_moe")


def opened_whole(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Forward:
    monkeypatch.setattr(torch_loading, "open_ops", lambda *_: DeviceOps(attends_together=True))
    config = ModelConfig(model=str(folder), cache_dir=str(cache), backend="torch", linear="plain", threads=1)
    return open_backend(config)


def turns(engine: Engine, strategy: str = "full") -> list[list[tuple[int, float | None]]]:
    """Sessions side by side, greedy and sampled, for two turns."""
    sessions = [engine.create_session(strategy=parse_strategy(strategy)).session_id for _ in range(3)]
    found = []
    for turn, sampling in enumerate((Sampling(), Sampling(temperature=0.8, seed=3))):
        for place, session in enumerate(sessions):
            engine.append(session, text(50 + 9 * place - 40 * turn, seed=10 * turn + place))
        asked = GenerateParams(max_tokens=12, sampling=sampling)
        found += [tokens(list(one)) for one in [engine.generate(session, asked) for session in sessions]]
    return found


@pytest.mark.parametrize("family", [family if family in FIRST else further(family) for family in FAMILIES])
def test_every_family_with_a_list_gives_the_tokens_of_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, **FAMILIES[family]}
    write_model(tmp_path / "model", sizes.pop("model_type", family), sizes)
    whole = opened_whole(tmp_path / "model", tmp_path / "cache", monkeypatch)
    with Engine(whole, EngineConfig(**SMALL)) as engine:
        expected = turns(engine)
    with two_ranks(tmp_path / "model", tmp_path / "cache") as forward:
        assert forward.facts.numerics == "listed, 2 ranks"
        with Engine(forward, EngineConfig(**SMALL)) as engine:
            assert turns(engine) == expected


def opened_with(folder: Path, cache: Path, weights: str) -> Forward:
    """The whole model, its weights quantised, as on a GPU."""
    config = ModelConfig(
        model=str(folder), cache_dir=str(cache), device="cpu", backend="torch", linear="plain", weights=weights
    )
    loaded = load_model(config.model, cache=cache, device="cpu", dtype="float32", attention=ATTENTION)
    return serve_loaded(loaded, config, admit(config), ops=DeviceOps(attends_together=True))


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_weights_are_quantised_to_the_numbers_of_the_whole_model(weights: str, tmp_path: Path) -> None:
    """An output's inputs are on two ranks, and have one scale in fp8, or one for each group."""
    write_model(tmp_path / "model", "qwen3", {**SIZES, "head_dim": 64, "intermediate_size": 512})
    whole = opened_with(tmp_path / "model", tmp_path / "cache", weights)
    with Engine(whole, EngineConfig(**SMALL)) as engine:
        expected = turns(engine)
    with two_ranks(tmp_path / "model", tmp_path / "cache", weights=weights) as forward:
        assert forward.facts.numerics == f"{whole.facts.numerics}, 2 ranks"
        with Engine(forward, EngineConfig(**SMALL)) as engine:
            assert turns(engine) == expected


def test_groups_of_inputs_that_ranks_would_have_parts_of_are_refused(folder: Path) -> None:
    with (
        pytest.raises(
            BackendError, match=r"weights=int4: each of 2 ranks has \d+ inputs of .*: start with weights=fp8"
        ),
        two_ranks(folder / "model", folder / "cache", weights="int4"),
    ):
        pass


@pytest.mark.parametrize(
    "layout", ["fp8, blocks", "awq", *map(further, ("compressed-tensors", "fp8, one scale", "gptq"))]
)
def test_weights_that_are_stored_quantised_are_split_as_they_are(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    config.intermediate_size = 128  # four groups
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        written(tmp_path / "model", layout, Qwen3ForCausalLM(config).eval())
    whole = opened_whole(tmp_path / "model", tmp_path / "cache", monkeypatch)
    with Engine(whole, EngineConfig(**SMALL)) as engine:
        expected = turns(engine)
    with two_ranks(tmp_path / "model", tmp_path / "cache") as forward:
        assert forward.facts.numerics.endswith(f"{LAYOUTS[layout][2]} weights, 2 ranks")
        with Engine(forward, EngineConfig(**SMALL)) as engine:
            assert turns(engine) == expected


def test_stored_groups_of_inputs_that_ranks_would_have_parts_of_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "model", "gptq, no groups")  # which are read as groups of 128
    with (
        pytest.raises(BackendError, match=r"each rank has \d+ inputs of .*, and 128 share a scale in its file"),
        two_ranks(tmp_path / "model", tmp_path / "cache"),
    ):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks")
    tiny_model().save_pretrained(found / "model")
    return found


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[TorchForward]:
    with two_ranks(folder / "model", folder / "cache") as forward:
        yield forward


def lives(engine: Engine, strategy: str) -> list[list[tuple[int, float | None]]]:
    """Forks of forks, going back, sessions that begin with what a closed one had, and drafts that are rejected."""
    found, seen = turns(engine, strategy), text(60, seed=5)
    first = engine.create_session(strategy=parse_strategy(strategy)).session_id
    engine.append(first, seen)
    asked = GenerateParams(max_tokens=24)
    found.append(tokens(drain(engine.generate(first, asked))))
    fork = engine.fork_session(first).session_id
    engine.append(fork, text(30, seed=6))
    found.append(tokens(drain(engine.generate(fork, asked))))
    again = [engine.fork_session(fork).session_id, engine.fork_session(first, at_position=40).session_id]
    for session in again:
        engine.append(session, text(9, seed=7))
        found.append(tokens(drain(engine.generate(session, asked))))
    engine.close_session(first)
    found.append(tokens(drain(engine.generate(fork, asked))))
    later = engine.create_session(strategy=parse_strategy(strategy)).session_id
    engine.append(later, [*seen, *text(20, seed=8)])
    found.append(tokens(drain(engine.generate(later, asked))))
    return found


@pytest.mark.parametrize("strategy", ["full", "sink_window:sink=4,window=16"])
def test_long_chunks_read_by_views_that_all_ranks_make(
    strategy: str, folder: Path, ranks: TorchForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TinyModel's first layer has a window of its own: there, as in a strategy's window, they read numbers."""
    monkeypatch.setattr(plan, "MOST_RAGGED_TOKENS", 8)
    with Engine(opened_whole(folder / "model", folder / "cache", monkeypatch), EngineConfig(**SMALL)) as engine:
        expected = turns(engine, strategy)
    read, attend = list[int](), CausalPlan.attend

    def counted(self: CausalPlan, layer: int, *given: Any, **named: Any) -> Any:
        read.append(layer)
        return attend(self, layer, *given, **named)

    monkeypatch.setattr(CausalPlan, "attend", counted)
    with Engine(ranks, EngineConfig(**SMALL)) as engine:
        assert turns(engine, strategy) == expected
    assert set(read) == ({0, 1, 2} if strategy == "full" else set())


def test_tokens_that_choose_read_numbers_however_many_are_computed_again(
    folder: Path, ranks: TorchForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a session has generated are, in long chunks, when it goes on after its K/V was dropped."""
    monkeypatch.setattr(plan, "MOST_RAGGED_TOKENS", 8)
    found = []
    for forward in (opened_whole(folder / "model", folder / "cache", monkeypatch), ranks):
        with Engine(forward, EngineConfig(**SMALL)) as engine:
            session = engine.create_session(strategy=parse_strategy(GATHER)).session_id
            engine.append(session, text(30))
            generate(engine, session, 60)
            drop_entries(engine, session)
            engine.append(session, text(5, seed=4))
            found.append(tokens(drain(engine.generate(session, GenerateParams(max_tokens=12)))))
    assert found[0] == found[1]


@pytest.mark.parametrize("share", [True, further(False)], ids=["shared", "copied"])
@pytest.mark.parametrize(
    "strategy",
    [
        "full",
        "sink_window:sink=4,window=16",
        "full:codec=lloyd4,exact_window=8",
        GATHER,
        *map(
            further,
            (
                "sink_window:sink=0,window=7",
                "layer_window:window=16,full_layers=2",
                "sink_window:sink=4,window=60,codec=int8g32,exact_window=8",
                "layer_window:window=40,full_layers=2,codec=bfloat16,exact_window=8",
            ),
        ),
    ],
)
def test_what_sessions_do_between_steps_is_done_on_every_rank(
    strategy: str, share: bool, folder: Path, ranks: TorchForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(**{**SMALL, "share_prefixes": "owner"}, share_forks=share)
    with Engine(
        opened_whole(folder / "model", folder / "cache", monkeypatch), config, drafter=NgramDrafter()
    ) as engine:
        expected = lives(engine, strategy)
    with Engine(ranks, config, drafter=NgramDrafter()) as engine:
        assert lives(engine, strategy) == expected
    assert isinstance(ranks.followers, InThread) and ranks.followers.error is None


def test_other_strategies_are_refused_by_name(ranks: TorchForward) -> None:
    with Engine(ranks, EngineConfig(**SMALL)) as engine:
        for name in strategy_names():
            if name not in STRATEGIES:
                with pytest.raises(InvalidArgument, match="not with tensor_parallel yet"):
                    engine.create_session(strategy=parse_strategy(name))
        with pytest.raises(InvalidArgument, match="components are not there with tensor_parallel"):
            engine.create_session(strategy=parse_strategy("gather:scorer=components"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": "int8"}, "weights=int8 yet: start with weights=auto"),
        ({"determinism": "batch-invariant"}, "determinism=batch-invariant yet"),
        ({"drafter": "trained"}, "drafter=trained yet: start with drafter=ngram"),
        ({"backend": "native"}, "backend=native yet"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        further(
            {"tensor_parallel": 4}, "tensor_parallel=4 does not divide num_key_value_heads, which is 2: start with 2"
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused_at_the_start(settings: dict[str, Any], said: str, folder: Path) -> None:
    given = {"model": str(folder / "model"), "cache_dir": str(folder / "cache"), "tensor_parallel": 2, **settings}
    with pytest.raises(KakeyaError, match=said):
        open_backend(ModelConfig(**given))


def test_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    tiny_model(hybrid="mamba").save_pretrained(tmp_path / "model")
    with (
        pytest.raises(BackendError, match="layers of other kinds than attention"),
        two_ranks(tmp_path / "model", tmp_path),
    ):
        pass


def test_a_step_that_fails_on_the_first_rank_is_the_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are within it: what they add up next would be of another step."""
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(BrokenBarrierError))  # of the other rank, in the end
        forward = stack.enter_context(two_ranks(folder / "model", folder / "cache"))
        group, listed = forward.followers.group, forward.listed
        assert isinstance(group, ThreadGroup) and listed is not None
        barrier, runs = group.meeting.barrier, listed.run

        def fails(*_: object) -> None:
            barrier.abort()  # as another rank ends that waits in vain
            raise RuntimeError("out of memory")

        engine = stack.enter_context(Engine(forward, EngineConfig(**SMALL)))
        session = engine.create_session().session_id
        engine.append(session, text(20))
        for run in (fails, runs):
            monkeypatch.setattr(listed, "run", run)
            with pytest.raises(EngineStalled):
                generate(engine, session, 4)
            assert engine.forward_failure


@pytest.mark.parametrize(
    "strategy",
    [
        "full",
        "sink_window:sink=4,window=16",
        "full:codec=lloyd4,exact_window=8",
        GATHER,
        *map(
            further,
            (
                "sink_window:sink=0,window=7",
                "layer_window:window=16,full_layers=2",
                "sink_window:sink=4,window=60,codec=int8g32,exact_window=8",
                "layer_window:window=40,full_layers=2,codec=bfloat16,exact_window=8",
            ),
        ),
    ],
)
def test_a_copy_in_a_file_has_the_heads_of_all_ranks(strategy: str, ranks: TorchForward, tmp_path: Path) -> None:
    """Of a session and of its fork, which reads in its memory; after a restart the rest alone is prefilled."""

    def made(*, journal: Any, metrics: Any, **settings: Any) -> Engine:
        config = EngineConfig(**{**SMALL, "hibernate": "always", **settings})
        return Engine(ranks, config, journal=journal, metrics=metrics)

    def goes_on(engine: Engine, session: str) -> tuple[list[tuple[int, float | None]], int]:
        events = drain(engine.generate(session, GenerateParams(max_tokens=12, logprobs=True)))
        assert isinstance(events[-1], Finished)
        return tokens(events), events[-1].cached_tokens

    with keeping(tmp_path / "state", make=made) as engine:
        first = engine.create_session(strategy=parse_strategy(strategy)).session_id
        engine.append(first, text(60))
        generate(engine, first, 6)
        sessions = [first, engine.fork_session(first).session_id]
        for session in sessions:
            engine.append(session, text(9, seed=3))
            generate(engine, session, 6)
        assert len(save_copies(engine, tmp_path / "state")) == 2
        for session in sessions:
            engine.append(session, text(25, seed=8))
        saved(engine)
        killed = after_a_kill(tmp_path / "state")
        expected = [goes_on(engine, session) for session in sessions]
    with keeping(killed, make=made) as engine:
        for session, (found, cached) in zip(sessions, expected, strict=True):
            engine.recall(session)
            again, cached_again = goes_on(engine, session)
            assert same(again, found, Mode.BATCHED) and cached_again == cached


def test_a_copy_is_read_for_others_where_the_part_of_a_rank_has_room(ranks: TorchForward, tmp_path: Path) -> None:
    def made(*, journal: Any, metrics: Any, **settings: Any) -> Engine:
        config = EngineConfig(**{**SMALL, "hibernate": "always", "share_prefixes": "owner", **settings})
        return Engine(ranks, config, journal=journal, metrics=metrics)

    def begun(engine: Engine) -> tuple[list[tuple[int, float | None]], int]:
        session = engine.create_session().session_id
        engine.append(session, text(100))
        events = drain(engine.generate(session, GenerateParams(max_tokens=6)))
        assert isinstance(events[-1], Finished)
        return tokens(events), events[-1].cached_tokens

    with keeping(tmp_path, make=made) as engine:
        expected, _ = begun(engine)
        (file,) = save_copies(engine, tmp_path)
    with keeping(tmp_path, make=made, prefix_bytes=file.stat().st_size - 1) as engine:
        copies_known(engine)
        found, cached = begun(engine)
        assert found == expected and cached >= 64


def test_a_second_tier_is_refused_with_ranks(ranks: TorchForward) -> None:
    parts = DLMRestoredVerifier(forward=ranks, latent=None, drafter=None, digests=lambda: ("", ""), tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"tier_bytes=.*leave it at 0"):
        parts.engine(EngineConfig(**{**SMALL, "tier_bytes": 2**20}))


def test_the_bound_of_a_session_is_of_each_rank(folder: Path, ranks: TorchForward, monkeypatch: Any) -> None:
    """Half of the whole model's: each rank has half of the heads, and kv_bytes of memory."""
    config, bounds = EngineConfig(**SMALL), []
    for forward in (opened_whole(folder / "model", folder / "cache", monkeypatch), ranks):
        with Engine(forward, config) as engine:
            bounds.append(engine.create_session(limit_tokens=256).bound.peak_bytes)
            assert engine.info().kv_capacity_bytes == SMALL["kv_bytes"]
    assert bounds[0] == 2 * bounds[1]


def test_a_rank_holds_its_part_of_the_weights_alone(folder: Path, ranks: TorchForward) -> None:
    stored = load_file(folder / "model" / "model.safetensors")
    split = {name for name in stored if "_proj" in name}
    own = dict(ranks.seam.model.named_parameters())
    assert split and all(2 * own[name].numel() == stored[name].numel() for name in split)
    assert 2 * own["lm_head.weight"].numel() == stored["model.embed_tokens.weight"].numel()
