"""What Generates took is counted by owner, and outlives sessions and the process."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from inference_engine.engine import Engine
from inference_engine.types import Finished, GenerateParams, Mode, TokenCommitted, TokenUsage
from kv_cache_proposer.ngram import NgramDrafter
from tests.kept import after_a_kill, keeping, saved
from tests.laws.variants import drain, engine_for, text


def taken(engine: Engine, session: str, owner: str, count: int = 8) -> TokenUsage:
    """Of one Generate, by its own end."""
    end = drain(engine.generate(session, GenerateParams(max_tokens=count), owner=owner))[-1]
    assert isinstance(end, Finished)
    return TokenUsage(
        prefilled_tokens=end.prefilled_tokens,
        cached_tokens=end.cached_tokens,
        generated_tokens=end.generated_tokens,
        drafted_tokens=end.drafted_tokens,
        accepted_tokens=end.accepted_tokens,
    )


def opened(engine: Engine, owner: str) -> str:
    session = engine.create_session(owner=owner).session_id
    engine.append(session, text(20) * 2, owner=owner)
    return session


def test_each_owner_has_the_sum_of_what_their_generates_took() -> None:
    with engine_for(Mode.BATCHED, drafter=NgramDrafter(min_ngram=1), draft_tokens=3) as engine:
        ours, theirs = opened(engine, "a"), opened(engine, "b")
        total = taken(engine, ours, "a") + taken(engine, ours, "a", 5)
        assert total.cached_tokens > 40 and total.drafted_tokens > 0
        other = taken(engine, theirs, "b", 3)
        engine.close_session(ours, owner="a")
        assert (engine.usage_of("a"), engine.usage_of("b")) == (total, other)
        assert engine.usage_of("c") == TokenUsage()
        seen = engine.metrics.registry.get_sample_value
        assert seen("kakeya_generate_cached_tokens_total") == total.cached_tokens + other.cached_tokens
        stopped = opened(engine, "c")
        generation = engine.generate(stopped, GenerateParams(max_tokens=50), owner="c", request_id=bytes(16))
        for event in generation:
            if isinstance(event, TokenCommitted):
                generation.cancel()
        part = engine.usage_of("c").generated_tokens
        drain(engine.generate(stopped, GenerateParams(max_tokens=50), owner="c", request_id=bytes(16)))
        assert 0 < part < 50 == engine.usage_of("c").generated_tokens  # each part once


def test_totals_outlive_the_process_and_the_sessions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with keeping(tmp_path / "state") as engine:
        total = taken(engine, ours := opened(engine, "a"), "a")
        engine.close_session(ours, owner="a")
        saved(engine)
        killed = after_a_kill(tmp_path / "state")
    with keeping(killed) as engine:
        assert engine.usage_of("a") == total
    with keeping(tmp_path / "state") as engine:
        assert engine.usage_of("a") == total
        twice = total + taken(engine, opened(engine, "a"), "a")
    with keeping(tmp_path / "state") as engine:
        assert engine.usage_of("a") == twice
    db = apsw.Connection(str(tmp_path / "state" / "journal.db"))
    db.execute("update usage set body = replace(body, ':', ';')")
    db.close()
    with keeping(tmp_path / "state") as engine:
        assert engine.usage_of("a") == TokenUsage()
    assert "counted anew" in caplog.text
