"""The pool on a CPU is address space until entries are written."""

from __future__ import annotations

import psutil

from inference_engine.types import GenerateParams
from tests.laws.variants import text
from tests.tiny import tiny_engine


def test_memory_is_taken_when_entries_are_written_and_not_before() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with tiny_engine(kv_bytes=4 * 2**30) as engine:
        session = engine.create_session().session_id
        engine.append(session, text(50))
        list(engine.generate(session, GenerateParams(max_tokens=5)))
        grown = process.memory_info().rss - before
        assert engine.info().kv_capacity_bytes > 3.9 * 2**30
    # What torch and the test itself take is far below a hundredth of the pool.
    assert grown < 256 * 2**20
