"""The mode that a step is computed in."""

from __future__ import annotations

import numpy as np
import torch

from inference_engine.decode.verifier import Block, Verifier
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from tests.tiny import PAGES, SMALL, tiny_forward


def test_a_step_within_a_step_leaves_the_thread_as_it_was() -> None:
    forward = tiny_forward()
    context = forward.open(forward.geometry(**PAGES), SMALL["kv_bytes"])
    verifier, (outer, inner) = Verifier(forward, context), (SessionKV(Full(), context, 64) for _ in range(2))
    blocks = [[Block(kv=kv, token_ids=np.array([1, 2, 3], dtype=np.uint32))] for kv in (outer, inner)]
    assert outer.wake(64) and inner.wake(64)

    def begin_another() -> None:
        verifier.run(blocks[1])

    verifier.start(blocks[0], on_planned=begin_another)
    assert not torch.is_inference_mode_enabled()
    assert (outer.staged, inner.staged) == (3, 3)
