"""Warm-up: what a device computes before its first call.

A GPU's kernels are compiled, and its libraries plan their operations, when they are first used for a shape. The first
long prompt would wait for that, so a prompt of the same chunks is computed when the engine starts: on the engine's
thread, for libraries keep what they planned by thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch

from inference_engine.decode.verifier import Block, Verifier
from inference_engine.kernels.sampler import Sampler
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Sampling

_log = logging.getLogger(__name__)


def done_on(between_steps: Callable[[Callable[[], None]], None], task: Callable[[], None]) -> None:
    """Run `task` by the scheduler's `between_steps` and wait for it. Raises what it raises."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            task()
        except Exception as error:  # which is raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(None)

    between_steps(run)
    done.result()


def warm_up(verifier: Verifier, strategy: KVStrategy, limit_tokens: int | None, step_tokens: int) -> None:
    """Prefill a prompt in a session of its own, and sample: two full steps and a shorter one, as far as a session goes.

    The session's memory is given back. Where the device has no memory for such a prompt, the log says so. Raises what
    a step raises otherwise.
    """
    tokens = 2 * step_tokens + step_tokens // 3
    tokens = tokens if limit_tokens is None else min(tokens, limit_tokens)
    kv = SessionKV(strategy, verifier.context, tokens)
    try:
        if not kv.wake(tokens):
            return
        sampler = Sampler(Sampling(), 0)
        while kv.length < tokens:
            count = min(kv.room(generated=False), step_tokens, tokens - kv.length)
            is_last = kv.length + count == tokens
            ids = np.zeros(count, dtype=np.uint32)
            verifier.run([Block(kv=kv, token_ids=ids, sampler=sampler if is_last else None)])
            kv.commit(kv.length + count)
    except torch.OutOfMemoryError as error:
        _log.warning(
            "no memory on the device for a prompt of %d tokens, in steps of %d, which will fail: start with a smaller "
            "kv_bytes or step_tokens (%s)",
            tokens,
            step_tokens,
            error,
        )
    finally:
        kv.release()
