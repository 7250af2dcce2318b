"""Small random models of a family, as transformers runs them, and taken over by the seam."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Admitted, Forward
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.models.loader import LoadedModel
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import ModelFacts
from kv_cache_proposer.ngram import NgramDrafter
from tests.laws.variants import generate, text
from tests.tiny import PAGES, SMALL, TRAINED_POSITIONS, VOCABULARY

COUNT = 24  # tokens that tests generate
HISTORIES = [text(70), text(33, seed=1), text(120, seed=2), text(12, seed=3) * 6]


def own_model(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Noise on every weight, norm and bias."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def forward_of(own: PreTrainedModel, admitted: Admitted) -> TorchForward:
    config = copy.deepcopy(own.config)
    config._attn_implementation = ATTENTION
    taken = type(own)(config).to(own.dtype).eval()
    taken.load_state_dict(own.state_dict())
    facts = ModelFacts(
        model_id=config.model_type,
        vocab_size=VOCABULARY,
        trained_positions=TRAINED_POSITIONS,
        device="cpu",
        dtype=str(own.dtype).removeprefix("torch."),
        refused_strategies=admitted.refused,
    )
    return TorchForward(Seam(taken, admitted.traits), facts, torch.device("cpu"))


def loaded(model: Any) -> LoadedModel:
    """A model in memory, as if it had been read from a folder."""
    return LoadedModel(
        model=model.requires_grad_(requires_grad=False),
        model_id="tiny",
        folder=Path(),
        trained_positions=TRAINED_POSITIONS,
        vocab_size=VOCABULARY,
        dtype="float32",
        device="cpu",
        weights_sha256=None,
    )


def continued(own: PreTrainedModel, history: list[int], count: int = COUNT) -> list[int]:
    """What transformers generates, greedily."""
    prompt = torch.tensor([history])
    out = own.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(history) :].tolist()
    return found


def ids_of(engine: Engine, session: str, count: int = COUNT) -> list[int]:
    return [token for token, _ in generate(engine, session, count)]


def stays_within_its_bounds(forward: Forward, strategies: Sequence[str], more_than: int = 0) -> None:
    """A session of each strategy holds more than so many bytes, and no more than it said."""
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        for strategy in strategies:
            session = engine.create_session(strategy=parse_strategy(strategy), limit_tokens=200).session_id
            engine.append(session, text(150))
            assert len(ids_of(engine, session)) == COUNT, strategy
            info = engine.session_info(session)
            assert more_than < info.kv_live_bytes <= info.bound.peak_bytes, strategy


def fills_its_bound(forward: Forward, limit: int = 64) -> int:
    """A session of so many tokens holds just the bytes that it said. Returns them."""
    kv = SessionKV(Full(), forward.open(forward.geometry(**PAGES), 2**24), limit)
    while kv.length < limit:
        kv.stage(16)
        kv.commit(kv.length + 16)
    assert kv.footprint().total_bytes == kv.bound.sustained_bytes == kv.bound.peak_bytes
    return kv.footprint().total_bytes


def continues_as_transformers(own: PreTrainedModel, forward: Forward, *, drafts: bool, count: int = COUNT) -> None:
    """Sessions in one batch, a fork, and second turns generate what transformers does, greedily."""
    drafter: dict[str, Any] = {"drafter": NgramDrafter()} if drafts else {}
    with Engine(forward, EngineConfig(**SMALL), **drafter) as engine:
        sessions = [engine.create_session(strategy=Full()).session_id for _ in HISTORIES]
        for session, history in zip(sessions, HISTORIES, strict=True):
            engine.append(session, history)
        with ThreadPoolExecutor(len(sessions)) as pool:
            got = list(pool.map(lambda session: ids_of(engine, session, count), sessions))
        assert got == [continued(own, history, count) for history in HISTORIES]
        fork = engine.fork_session(sessions[0])
        assert fork.prefill_tokens == 1
        for session, turn in ((fork.session_id, [5, 6, 7]), (sessions[0], [9, 10])):
            engine.append(session, turn)
            assert ids_of(engine, session) == continued(own, HISTORIES[0] + got[0] + turn)
