"""The verifier: runs the target over a block of rows of several sessions.

A block is the tokens of one session that have no K/V yet: a chunk of prefill, the last sampled token, or tokens whose
likelihood is asked for. Its last row's logits give the next token when the block reaches the end of the history. One
synchronisation per step: the token ids come back together.

    drafted     a b c d         four draft tokens after the last token x
    rows        x a b c d       each row gives the target's own sample of what follows it
    samples     a b y           a and b were right; y is the sample in c's place, and what came after c counts no more

So a draft decides how many tokens a step gives, and never which (Leviathan et al., arXiv 2211.17192; here a draft token
has to equal the keyed sample, which is the same distribution and the same tokens as without a draft).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.base import Forward, Step
from inference_engine.errors import InvariantViolated, RestorationFailed
from inference_engine.kernels.sampling import Draw, Sample, Sampler
from inference_engine.kv.context import KVContext
from inference_engine.kv.plan import Span, SpanFailed, StepPlan
from inference_engine.kv.session_kv import SessionKV


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rows of one session for one step. `sampler` is None when no token is wanted: more prefill follows, or a score.

    drafted: how many of the last ids are a drafter's draft tokens, counted as generated.
    wanted_logits: of how many of its last rows the logits are wanted as they are.
    wants_taps: the rows' hidden states are wanted, after the layers that the verifier was told.
    """

    kv: SessionKV
    token_ids: NDArray[np.uint32]
    generated: NDArray[np.bool_] | None = None  # which of them the model generated; None: none
    drafted: int = 0
    sampler: Sampler | None = None
    wants_logprob: bool = False
    wanted_logits: int = 0
    wants_taps: bool = False

    @property
    def sampled(self) -> int:
        """Of how many of its last rows a sample is drawn."""
        return 0 if self.sampler is None else 1 + self.drafted

    @property
    def draft_tokens(self) -> list[int]:
        ids: list[int] = self.token_ids[len(self.token_ids) - self.drafted :].tolist()
        return ids

    def draws(self, end: int) -> Iterator[Draw]:
        """What is to be sampled of its rows, the last of which is the one before number `end` of the logits.

        Once its rows are staged.
        """
        if self.sampler is not None:
            yield Draw(
                rows=range(end - self.sampled, end),
                sampler=self.sampler,
                position=self.kv.next_position + self.kv.staged - self.drafted,
                drafted=self.draft_tokens,
                wants_logprob=self.wants_logprob,
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a block gave.

    samples: where a sampler was, those that follow from each other: one for each draft token that was right, and one
    more. logits: [wanted_logits, V] float32. taps: [rows, layers, hidden].
    """

    samples: tuple[Sample, ...] = ()
    logits: Tensor | None = None
    taps: Tensor | None = None


class BlockFailed(Exception):
    """Block number `index` broke an invariant; no block was committed."""

    def __init__(self, index: int, violation: InvariantViolated) -> None:
        super().__init__(str(violation))
        self.index = index
        self.violation = violation


class Verifier:
    """The target model at work. Only the engine's thread calls it."""

    def __init__(
        self,
        forward: Forward,
        context: KVContext,
        *,
        tap_layers: tuple[int, ...] = (),
        lap: Callable[[str], None] = lambda _: None,
    ) -> None:
        """tap_layers: after which layers hidden states are taken, for blocks that want them.

        lap: told at the end of each part of a step; see `metrics.StepTimer`.
        """
        self._forward = forward
        self._lap = lap
        self.context = context  # what the sessions live in
        self._tap_layers = tap_layers

    def waits(self, blocks: Sequence[Block]) -> bool:
        """Does `run` of these blocks return when they are computed? A GPU works on its own; a sample is waited for."""
        return self._forward.device.type == "cpu" or any(block.sampled for block in blocks)

    def run(self, blocks: Sequence[Block], *, on_planned: Callable[[], None] = lambda: None) -> list[Outcome]:
        """Forward all blocks in one step. on_planned: called right before the device gets to work.

        The rows are staged: the caller commits each session, to the length it accepts. If the forward raises, nothing
        is staged and every session is as it was. Raises BlockFailed for a broken invariant, SpanFailed, with the
        block's index, for old rows that could not be had, or are not finite: `sleep` then raises, too.
        """
        try:
            for index, block in enumerate(blocks):
                try:
                    block.kv.stage(len(block.token_ids), block.generated)
                except InvariantViolated as violation:
                    raise BlockFailed(index, violation) from violation
            return self._forward_and_sample(blocks, on_planned)
        except BaseException:
            for block in blocks:
                # A device that failed the forward may fail this too; the sessions' tables are right all the same.
                with contextlib.suppress(RuntimeError):
                    block.kv.commit(block.kv.next_position)
            raise

    @torch.inference_mode()
    def _forward_and_sample(self, blocks: Sequence[Block], on_planned: Callable[[], None]) -> list[Outcome]:
        context = self.context
        plan = StepPlan(
            [block.kv for block in blocks],
            context.geometry,
            context.pool,
            mask_dtype=self._forward.compute_dtype,
            ops=context.ops,
            on_choice=context.on_choice,
        )
        token_ids = np.zeros(plan.query_count, dtype=np.int64)
        wanted: list[int] = []  # packed rows whose logits are computed
        ends: list[int] = []  # per block, one past its last row's place in `wanted`
        draws: list[Draw] = []
        for block, span in zip(blocks, plan.spans, strict=True):
            token_ids[span.real] = block.token_ids
            count = max(block.wanted_logits, block.sampled)
            rows = _aligned_queries(span, context.geometry.token_quantum, count)
            ends.append(len(wanted) + (span.real.stop - rows.start if count else 0))
            wanted.extend(rows)
            draws.extend(block.draws(ends[-1]))
        tap_layers = self._tap_layers if any(block.wants_taps for block in blocks) else ()
        reported = [(index, block) for index, block in enumerate(blocks) if block.sampled or block.wanted_logits]

        def on_computed() -> None:
            self._lap("forward")
            for _, block in reported:
                block.kv.ask_finite()

        on_planned()
        self._lap("plan")
        result = self._forward.run(Step(token_ids, plan, wanted, tap_layers, draws, on_computed))
        self._lap("sample")
        for index, block in reported:
            try:
                block.kv.require_finite()
            except RestorationFailed as failure:
                raise SpanFailed(index, failure) from failure
        samples = iter(result.samples)
        return [
            Outcome(
                samples=_agreeing(block, next(samples)) if block.sampled else (),
                logits=result.logits[end - block.wanted_logits : end].clone() if block.wanted_logits else None,
                taps=result.taps[span.real] if result.taps is not None and block.wants_taps else None,
            )
            for block, span, end in zip(blocks, plan.spans, ends, strict=True)
        ]


def _agreeing(block: Block, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples up to the first that is not the draft token in its place, that one included."""
    if not block.drafted:
        return tuple(samples)
    for count, (sample, draft_token) in enumerate(zip(samples, block.draft_tokens, strict=False), start=1):
        if sample.token_id != draft_token or not sample.is_finite:
            return tuple(samples[:count])
    return tuple(samples)


def _aligned_queries(span: Span, quantum: int, count: int) -> range:
    """The whole quanta of packed rows that the span's last `count` rows belong to."""
    if not count:
        return range(0)
    start = span.packed.start
    first = start + (span.real.stop - count - start) // quantum * quantum
    return range(first, start - (start - span.real.stop) // quantum * quantum)
