"""Killed and resumed = never killed, over every registered strategy: amid a Generate, and at the next one."""

from __future__ import annotations

from pathlib import Path

from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Event, GenerateParams, Mode, Sampling, TokenCommitted
from tests.kept import after_a_kill, keeping
from tests.laws.variants import MODES, drain, each_strategy_with, engine_for, generate, same, text, tokens

REQUEST = bytes(16)
PARAMS = GenerateParams(max_tokens=12, sampling=Sampling(temperature=0.9, top_p=0.95), logprobs=True)


@each_strategy_with(mode=MODES)
def test_a_session_that_was_killed_goes_on_as_one_that_never_was(
    tmp_path: Path, strategy: KVStrategy, mode: Mode
) -> None:
    def make(**settings: object) -> object:
        return engine_for(mode, **settings)

    with keeping(tmp_path / "state", make=make) as engine:
        session = engine.create_session(strategy=strategy).session_id
        for turn in range(2):
            engine.append(session, text(30 + turn, seed=turn))
            generate(engine, session, 6)
        events, seen = iter(engine.generate(session, PARAMS, request_id=REQUEST)), list[Event]()
        while len(tokens(seen)) < 6:
            seen.append(next(events))
        killed = after_a_kill(tmp_path / "state")
        seen += events
        never_killed = tokens(seen), generate(engine, session)
    with keeping(killed, make=make) as engine:
        engine.recall(session)
        first = next(event.position for event in seen if isinstance(event, TokenCommitted))
        resumed = tokens(drain(engine.generate(session, PARAMS, request_id=REQUEST, resume_from=first + 5)))
        assert same(never_killed[0][5:], resumed, mode)
        assert same(never_killed[1], generate(engine, session), mode)
