"""LongRoPE: two rotation tables in one model, of which a session's limit takes one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_engine.backends.twin import TOLERANCE, admit_config
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.kv.strategies.sink_window import SinkWindow
from tests.backends.test_families import SIZES, write_config, write_model
from tests.further import further
from tests.laws.variants import generate, prefill, text
from tests.tiny import SMALL

SHORT, TRAINED = 64, SIZES["max_position_embeddings"]
FACTORS = {"short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [4.0 + pair for pair in range(8)]}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": SHORT,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.2, **FACTORS},
}
SERVED = {"phi3": {**SIZES, **LONGROPE}}
# A family that has no list: torch's modules run it.
WITHOUT_LIST = {"model_type": "stablelm", **SIZES, "partial_rotary_factor": 1.0}
COUNT = 16
EXECUTORS = ("native", "torch", further("mlx"))


@pytest.fixture(scope="module", params=EXECUTORS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    folder = tmp_path_factory.mktemp("longrope")
    write_model(folder / "model", "phi3", SERVED["phi3"])
    device = "mlx" if request.param == "mlx" else "cpu"
    backend = {"device": "mlx"} if device == "mlx" else {"backend": request.param}
    config = ModelConfig(model=str(folder / "model"), cache_dir=str(folder / "cache"), threads=1, **backend)
    with Engine(open_backend(config), EngineConfig(**{**SMALL, "share_prefixes": "owner"})) as engine:
        yield engine, folder / "model"


def by_transformers(folder: Path, history: list[int], *, short: int = SHORT) -> list[int]:
    """short: up to which length transformers takes the short table."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", original_max_position_embeddings=short
    )
    model.generation_config.pad_token_id = 0
    prompt = torch.tensor([history])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=COUNT, do_sample=False)
    tokens: list[int] = out[0, len(history) :].tolist()
    return tokens


def said(engine: Engine, session_id: str) -> list[int]:
    return [token for token, _ in generate(engine, session_id, COUNT)]


def test_a_sessions_limit_takes_the_table_and_its_neighbours_do_not(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    history, longer = text(40), text(90)
    short = engine.create_session(limit_tokens=SHORT).session_id
    long = engine.create_session(limit_tokens=SHORT + 1).session_id
    past = engine.create_session().session_id
    engine.append(short, history)
    engine.append(long, history)
    engine.append(past, longer)
    expected = by_transformers(folder, history), by_transformers(folder, history, short=1)

    assert expected[0] != expected[1]
    assert (said(engine, short), said(engine, long)) == expected
    assert said(engine, past) == by_transformers(folder, longer)
    # The fork may grow longer than its parent, so its history is prefilled by the other table.
    fork = engine.fork_session(short, limit_tokens=TRAINED).session_id
    engine.append(fork, [5])
    assert said(engine, fork) == by_transformers(folder, [*history, *expected[0], 5], short=1)
    rest = engine.fork_session(short).session_id
    assert prefill(engine, rest).cached_tokens > 0


def test_what_begins_alike_is_not_shared_between_tables(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    history = text(41, seed=2)
    expected = by_transformers(folder, history), by_transformers(folder, history, short=1)
    parent = engine.create_session(limit_tokens=SHORT).session_id
    engine.append(parent, history)
    short, long = (engine.fork_session(parent, limit_tokens=limit).session_id for limit in (SHORT, TRAINED))
    assert (said(engine, short), said(engine, long)) == expected
    for session in (parent, short, long):
        engine.close_session(session)
    sessions = [engine.create_session(limit_tokens=limit).session_id for limit in (TRAINED, SHORT)]
    for session in sessions:
        engine.append(session, history)
        assert prefill(engine, session).cached_tokens > 0
    assert [said(engine, session) for session in sessions] == [*reversed(expected)]


def test_keys_are_moved_by_the_sessions_own_table(served: tuple[Engine, Path]) -> None:
    """Sinks move with the window. With a window that holds all, nothing is lost but what moving would turn wrongly."""
    engine, folder = served
    strategy = SinkWindow(sink=4, window=48)
    for limit in (SHORT, TRAINED):
        session = engine.create_session(strategy=strategy, limit_tokens=limit).session_id
        engine.append(session, text(40))
        whole = by_transformers(folder, text(40), short=SHORT if limit == SHORT else 1)
        assert said(engine, session)[:8] == whole[:8]


@pytest.mark.parametrize("family", ["phi3", further("stablelm")])
def test_every_strategy_serves_a_twin_of_it(family: str, tmp_path: Path) -> None:
    sizes = SERVED["phi3"] if family == "phi3" else {**WITHOUT_LIST, **LONGROPE}
    admitted = admit_config(write_config(tmp_path / "model", sizes.pop("model_type", family), dict(sizes)))
    assert not admitted.refused
    assert max(difference for _, difference in admitted.differences) <= TOLERANCE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"long_factor": [1.0] * 7}, "long_factor of 7 numbers"),
        ({"short_factor": [1.0] * 7 + [0.0]}, "short_factor of 8 numbers"),
        ({"original_max_position_embeddings": TRAINED + 1}, str(TRAINED + 1)),
    ],
)
def test_a_table_that_is_none_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    rope = {**LONGROPE["rope_parameters"], "original_max_position_embeddings": SHORT, **changes}
    with pytest.raises(ModelError, match=said):
        admit_config(write_config(tmp_path / "model", "llama", {**SIZES, "rope_parameters": rope}))


@pytest.mark.usefixtures("trying_no_strategies")
def test_dynamic_is_plain_within_the_trained_length_and_no_session_goes_further(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    own = write_model(tmp_path / "model", "llama", {**SIZES, "rope_parameters": rope})
    history = text(90)
    output = own.generate(torch.tensor([history]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    forward = open_backend(ModelConfig(model=str(tmp_path / "model"), cache_dir=str(tmp_path / "cache"), threads=1))
    with Engine(forward, EngineConfig(**SMALL)) as engine:
        session = engine.create_session().session_id
        engine.append(session, history)
        assert said(engine, session) == output[0, len(history) :].tolist()
        endless = engine.create_session(strategy=SinkWindow(sink=4, window=24))
        assert endless.limit_tokens == TRAINED
        with pytest.raises(InvalidArgument, match=str(TRAINED)):
            engine.create_session(strategy=SinkWindow(sink=4, window=24), limit_tokens=TRAINED + 1)
