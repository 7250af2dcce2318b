"""The verifier: runs the target over a block of rows of several sessions.

A block is the tokens of one session that have no K/V yet: a chunk of prefill, or the last sampled token. Its last
row's logits give the next token when the block reaches the end of the history. One synchronisation per step: the token
ids come back together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.base import Forward, Step
from inference_engine.decode.sampling import Sampler, logprob
from inference_engine.errors import InvariantViolated
from inference_engine.kv.plan import Span, StepPlan
from inference_engine.kv.session_kv import KVContext, SessionKV


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rows of one session for one step. `sampler` is None when more prefill follows and no logits are wanted."""

    kv: SessionKV
    token_ids: NDArray[np.uint32]
    sampler: Sampler | None = None
    wants_logprob: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """What a block's last row gave. `is_finite` is False if its logits were not: then there is no token."""

    token_id: int
    logprob: float | None
    is_finite: bool


class BlockFailed(Exception):
    """Block number `index` broke an invariant; no block was committed."""

    def __init__(self, index: int, violation: InvariantViolated) -> None:
        super().__init__(str(violation))
        self.index = index
        self.violation = violation


class Verifier:
    """The target model at work. Only the engine's thread calls it."""

    def __init__(self, forward: Forward, context: KVContext) -> None:
        self._forward = forward
        self._context = context

    def run(self, blocks: Sequence[Block]) -> list[Sample | None]:
        """Forward all blocks in one step; a sample stands where one was wanted.

        The rows are staged: the caller commits each session, to the length it accepts. If the forward raises, nothing
        is staged and every session is as it was. Raises BlockFailed for a broken invariant.
        """
        try:
            for index, block in enumerate(blocks):
                try:
                    block.kv.stage(len(block.token_ids))
                except InvariantViolated as violation:
                    raise BlockFailed(index, violation) from violation
            return self._forward_and_sample(blocks)
        except BaseException:
            for block in blocks:
                # A device that failed the forward may fail this too; the sessions' tables are right all the same.
                with contextlib.suppress(RuntimeError):
                    block.kv.commit(block.kv.length)
            raise

    @torch.inference_mode()
    def _forward_and_sample(self, blocks: Sequence[Block]) -> list[Sample | None]:
        context = self._context
        plan = StepPlan(
            [block.kv for block in blocks], context.geometry, context.pool, mask_dtype=self._forward.compute_dtype
        )
        token_ids = np.zeros(plan.row_count, dtype=np.int64)
        wanted: list[int] = []  # packed rows whose logits are computed
        last: dict[int, int] = {}  # block -> its last row's place in `wanted`
        for index, (block, span) in enumerate(zip(blocks, plan.spans, strict=True)):
            token_ids[span.real] = block.token_ids
            if block.sampler is not None:
                quad = _aligned_rows(span, context.geometry.row_quantum)
                last[index] = len(wanted) + quad.index(span.real.stop - 1)
                wanted.extend(quad)
        logits = self._forward.run(Step(token_ids, plan, wanted))
        return self._sample(blocks, last, logits)

    def _sample(self, blocks: Sequence[Block], last: dict[int, int], logits: Tensor) -> list[Sample | None]:
        samples: list[Sample | None] = [None] * len(blocks)
        if not last:
            return samples
        rows = logits[list(last.values())]
        finite = torch.isfinite(rows).all(dim=-1)
        tokens = rows.argmax(dim=-1)
        logprobs = torch.zeros(len(last), device=rows.device)
        for place, index in enumerate(last):
            block = blocks[index]
            assert block.sampler is not None
            if not block.sampler.is_plain_greedy:
                tokens[place] = block.sampler.draw(rows[place], block.kv.length + block.kv.staged)
            if block.wants_logprob:
                logprobs[place] = logprob(rows[place], tokens[place])
        # The step's one synchronisation: ids are exact in float64.
        table = torch.stack([tokens.double(), finite.double(), logprobs.double()]).tolist()
        for place, index in enumerate(last):
            wants = blocks[index].wants_logprob
            samples[index] = Sample(int(table[0][place]), table[2][place] if wants else None, bool(table[1][place]))
        return samples


def _aligned_rows(span: Span, quantum: int) -> list[int]:
    """The whole quantum of packed rows that the span's last row belongs to."""
    last = span.real.stop - 1
    first = span.rows.start + (last - span.rows.start) // quantum * quantum
    return list(range(first, first + quantum))
