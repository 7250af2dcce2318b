"""Many prompts at once: what the engine has no room for waits for another to end."""

from __future__ import annotations

import numpy as np

from inference_engine.kv.strategies.full import Full
from laboratory.evaluation.asking import Asked, answer_all
from tests.tiny import VOCABULARY, tiny_engine


def test_prompts_beyond_the_queue_are_answered_as_they_would_be_alone() -> None:
    draws = np.random.default_rng(0).integers(VOCABULARY, size=(12, 20))
    asked = [Asked(strategy=Full(), token_ids=tuple(draw.tolist())) for draw in draws]
    with tiny_engine(max_queued=2, max_running=1) as engine:
        together = answer_all(engine, asked, answer_tokens=4, stop_ids=())
        alone = [answer_all(engine, [one], answer_tokens=4, stop_ids=())[0] for one in asked]
        assert engine.info().kv_reserved_bytes == 0
    assert together == alone
