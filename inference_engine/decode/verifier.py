"""The verifier of speculative decoding: runs the target over a block of tokens for each of several sessions.

A block is the tokens of one session that have no K/V yet: a chunk of prefill, the last sampled token, or tokens to be
scored. If the block reaches the end of the history, the logits of its last token give the next one. One synchronisation
per step: all sampled ids come back together.

    drafted     a b c d         four draft tokens after the last token x
    tokens      x a b c d       for each, the target samples the one that follows it
    samples     a b y           a and b are accepted; y is sampled in the place of c, and d is discarded

So a draft decides how many tokens a step gives, and never which (Leviathan et al., arXiv 2211.17192; here a draft token
must equal the keyed sample, which gives the same distribution and the same tokens as without a draft).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.base import Forward, Launched, Result, Step
from inference_engine.errors import InvariantViolated, RestorationFailed
from inference_engine.kernels.sampler import Sampler
from inference_engine.kernels.sampling import Draw, Draws, Sample
from inference_engine.kv.context import KVContext
from inference_engine.kv.parts.archived import Asked
from inference_engine.kv.plan import SpanFailed, StepPlan
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.views import StagedQueries


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Tokens of one session for one step. `sampler` is None if none is sampled: more prefill follows, or it is a score.

    drafted: how many of the last ids are draft tokens; they count as generated.
    wanted_logits: for how many of its last tokens the logits are returned.
    needs_taps: return the tokens' hidden states after the verifier's `tap_layers`.
    """

    kv: SessionKV
    token_ids: NDArray[np.uint32]
    generated: NDArray[np.bool_] | None = None  # which of them the model generated; None: none
    drafted: int = 0
    sampler: Sampler | None = None
    needs_logprob: bool = False
    top_logprobs: int = 0
    wanted_logits: int = 0
    needs_taps: bool = False

    @property
    def sampled(self) -> int:
        """For how many of its last tokens the next one is sampled."""
        return 0 if self.sampler is None else 1 + self.drafted

    @property
    def is_decoded(self) -> bool:
        """Is it one token that the model generated, from which the next one is sampled, and nothing else?"""
        is_sampled = self.sampler is not None and not self.drafted and not self.wanted_logits
        return is_sampled and self.generated is not None and len(self.token_ids) == 1 and bool(self.generated[0])

    def continues(self, before: Block, position: int) -> bool:
        """Does it follow another one of the same Generate, whose token is at `position`, and which is decoded, too?"""
        return (
            self.kv is before.kv
            and self.sampler is before.sampler
            and not (self.drafted or self.wanted_logits)
            and self.generated is not None
            and len(self.token_ids) == 1
            and bool(self.generated[0])
            and self.kv.length == position + 1
            and self.needs_taps == before.needs_taps
        )

    @property
    def draft_tokens(self) -> list[int]:
        ids: list[int] = self.token_ids[len(self.token_ids) - self.drafted :].tolist()
        return ids

    def draw(self, sampler: Sampler, end: int, position: int) -> Draw:
        """The samples to draw for this block, whose last token has index `end` - 1 in the logits.

        position: of the token after the block.
        """
        return Draw(
            indices=range(end - 1 - self.drafted, end),
            sampler=sampler,
            position=position - self.drafted,
            drafted=self.draft_tokens if self.drafted else (),
            needs_logprob=self.needs_logprob,
            top_logprobs=self.top_logprobs,
        )


class Outcome(NamedTuple):
    """The result of a block; a tuple, because every token makes one.

    samples: if it had a sampler, one for each accepted draft token, and one more. logits: [wanted_logits, V] float32.
    taps: [tokens, layers, hidden].
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


@dataclass(slots=True)
class _Checks:
    """Whether the old entries that a step read of its sessions are finite: its device says so after the step.

    asked_of: the blocks whose logits or samples are returned, by index, if their sessions have such entries.
    """

    asked_of: Sequence[tuple[int, Block]]
    asked: Sequence[tuple[Asked, ...]] = ()

    def following(self, blocks: Sequence[Block]) -> _Checks:
        return _Checks([(index, blocks[index]) for index, _ in self.asked_of])

    def ask(self, lap: Callable[[], None]) -> None:
        """Called when the step is computed, or launched."""
        lap()
        self.asked = [block.kv.ask_finite() for _, block in self.asked_of]

    def failures(self) -> list[SpanFailed]:
        """The sessions whose entries are not finite. Waits for this step, and for none behind it."""
        failed = []
        for (index, block), asked in zip(self.asked_of, self.asked, strict=True):
            try:
                block.kv.require_finite(asked)
            except RestorationFailed as failure:
                failed.append(SpanFailed(index, failure))
                failed[-1].__cause__ = failure
        return failed


@dataclass(frozen=True, slots=True)
class _Planned:
    """Staged blocks as a step of the device. ends: of each block, one past its last token's logits in the result."""

    blocks: Sequence[Block]
    step: Step
    draws: Draws  # of the step
    ends: Sequence[int]
    checks: _Checks | None  # of old entries; None: no session has any that are checked

    @property
    def can_be_followed(self) -> bool:
        """Is the plan of the next tokens known, if all sessions go on decoding?"""
        return all(block.is_decoded for block in self.blocks) and self.step.plan.grows_evenly

    def precedes(self, blocks: Sequence[Block]) -> bool:
        """Are these the next tokens of the same Generates, in the same order?"""
        if len(blocks) != len(self.blocks):
            return False
        return all(map(Block.continues, blocks, self.blocks, self.step.plan.positions.tolist()))

    def following(
        self, blocks: Sequence[Block], lap: Callable[[], None], token_ids: NDArray[np.int64] | None = None
    ) -> _Planned:
        """The step behind this one, of one token each, whose blocks are staged. token_ids: None if its ids come from
        this one."""
        draws, checks, on_computed = self.draws.following(), None, lap
        if self.checks is not None:
            checks = self.checks.following(blocks)
            on_computed = partial(checks.ask, lap)
        before = self.step
        step = Step(
            before.token_ids if token_ids is None else token_ids,
            before.plan.following(),
            before.logit_queries,
            before.tap_layers,
            draws,
            on_computed,
            before.needs_logits,
        )
        return _Planned(blocks, step, draws, self.ends, checks)

    def outcomes(self, result: Result) -> list[Outcome]:
        samples = iter(result.samples)
        return [
            Outcome(
                samples=_agreeing(block, next(samples)) if block.sampler is not None else (),
                logits=result.logits[end - block.wanted_logits : end].clone() if block.wanted_logits else None,
                taps=result.taps[span.real] if result.taps is not None and block.needs_taps else None,
            )
            for block, span, end in zip(self.blocks, self.step.plan.spans, self.ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step of one sampled token for each of its sessions, which the device may still be computing."""

    _planned: _Planned
    _launched: Launched

    @property
    def blocks(self) -> Sequence[Block]:
        return self._planned.blocks

    @property
    def ids(self) -> Tensor:
        """The sampled ids, int64 [blocks], on the device."""
        return self._launched.ids

    def failures(self) -> list[SpanFailed]:
        """Which sessions read old entries that are not finite, once the step was waited for: theirs are no outcomes."""
        return [] if self._planned.checks is None else self._planned.checks.failures()

    def draw(self) -> None:
        """Start its draws, if they wait for masks, which depend on the tokens of the step before."""
        self._launched.draw()

    @property
    def commits_ahead(self) -> bool:
        """May its entries be committed before it is computed?"""
        checks = self._planned.checks
        return checks is None or all(block.kv.commits_ahead for _, block in checks.asked_of)

    def wait(self) -> list[Outcome]:
        """The outcomes, as `Verifier.start` returns them. Raises what the step failed with; its entries stay staged."""
        result = self._launched.result()
        if result.taps is None:  # of each block there is one sample, and nothing else
            return [Outcome((sample,)) for (sample,) in result.samples]
        return self._planned.outcomes(result)


class Verifier:
    """Runs steps of the target model. Only the engine's thread calls it."""

    def __init__(
        self,
        forward: Forward,
        context: KVContext,
        *,
        tap_layers: tuple[int, ...] = (),
        lap: Callable[[str], None] = lambda _: None,
    ) -> None:
        """tap_layers: the layers whose hidden states are returned to blocks that ask for them.

        lap: called at the end of each part of a step but its last, sampling; see `scheduler.step_time.StepTimer`.
        """
        self._forward = forward
        self._is_in_step = forward.device.type == "cpu"  # is the device done with a step when the call returns?
        self._launches = forward.launcher is not None
        # On a GPU the host is ahead of it, and ranks have to run the same.
        self._can_end = self._is_in_step and context.pool.mirror is None
        self._before: _Planned | None = None  # the last step, if it `can_be_followed`
        self._lap = lap
        self.context = context  # of the sessions
        self._tap_layers = tap_layers

    def waits(self, blocks: Sequence[Block]) -> bool:
        """Does `run` return only when these blocks are computed? On a GPU only if tokens are sampled."""
        return self._is_in_step or any(block.sampled for block in blocks)

    def run(self, blocks: Sequence[Block]) -> list[Outcome]:
        """As `start`, for a step that is waited for."""
        outcomes = self.start(blocks)
        assert isinstance(outcomes, list), "nothing was launched"
        return outcomes

    def start(
        self,
        blocks: Sequence[Block],
        *,
        launches: bool = False,
        on_planned: Callable[[], None] = lambda: None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> list[Outcome] | InFlight:
        """Forward all blocks in one step. on_planned: called right before work for the device is launched.

        launches: if that is possible, do not wait for it; each block samples from its only token.
        is_wanted: a step for which it turns false raises StepUnwanted, where the device can end one.

        The entries are staged: the caller commits each session, to the length it accepts. If the forward raises,
        nothing is staged and every session is as it was. Raises BlockFailed for a broken invariant, and SpanFailed,
        with the block's index, for old entries that could not be restored or are not finite: `idle` then raises, too.
        """
        launcher = self._forward.launcher if launches else None
        try:
            with self._forward.inference_mode():
                planned = self._plan(blocks)
                if self._can_end:
                    planned.step.plan.is_wanted = is_wanted
                on_planned()
                self._lap("plan")
                if launcher is not None and launcher.can_launch(planned.step):
                    launched = launcher.launch(planned.step)
                    launched.draw()
                    return InFlight(planned, launched)
                result = self._forward.run(planned.step)
                if planned.checks is not None:
                    for failed in planned.checks.failures():
                        raise failed
                return planned.outcomes(result)
        except BaseException:
            discard(blocks)
            raise

    def follow(self, blocks: Sequence[Block], behind: InFlight) -> InFlight | None:
        """Launch the step behind another, of the same sessions in the same order, whose entries are committed: its
        samples are the tokens of this one. None, with nothing staged, for a step that cannot be launched. Under masks,
        `InFlight.draw` has to follow.

        The blocks may be those of the other step. Raises as `start`.
        """
        launcher = self._forward.launcher
        assert launcher is not None, "another step was launched"
        try:
            with self._forward.inference_mode():
                _stage(blocks)
                planned = behind._planned.following(blocks, partial(self._lap, "forward"))
                self._lap("plan")
                if launcher.can_launch(planned.step):
                    return InFlight(planned, launcher.launch(planned.step, behind.ids))
        except BaseException:
            discard(blocks)
            raise
        discard(blocks)
        return None

    def launches_ahead(self, choice: str) -> bool:
        """Are steps to be started without waiting for those before? choice: `EngineConfig.overlap`."""
        if self._forward.launcher is None or self.context.geometry.token_quantum > 1:
            return False
        return choice == "on" or (choice == "auto" and self._forward.device.type != "cpu")

    def forget_plan(self) -> None:
        """No Generate is running: its sampler is not kept for a step that may never come."""
        self._before = None

    def _plan(self, blocks: Sequence[Block]) -> _Planned:
        """Stage the blocks, and plan the step: as the one before it, if its sessions go on decoding.

        Where steps are launched ahead, `follow` does so.
        """
        _stage(blocks)
        if self._launches:
            return self._plan_anew(blocks)
        before, self._before = self._before, None
        if before is None or not before.precedes(blocks):
            planned = self._plan_anew(blocks)
            self._before = planned if planned.can_be_followed else None
        else:
            token_ids = np.array([block.token_ids[0] for block in blocks], dtype=np.int64)
            self._before = planned = before.following(blocks, partial(self._lap, "forward"), token_ids)
        return planned

    def _plan_anew(self, blocks: Sequence[Block]) -> _Planned:
        context = self.context
        plan = StepPlan(
            [block.kv for block in blocks],
            context.geometry,
            context.pool,
            mask_dtype=self._forward.compute_dtype,
            ops=context.ops,
        )
        token_ids = np.zeros(plan.query_count, dtype=np.int64)
        wanted: list[int] = []  # packed tokens whose logits are computed
        ends: list[int] = []  # per block, one past the place of its last token in `wanted`
        drawn: list[Draw] = []
        asked_of: list[tuple[int, Block]] = []
        needs_logits = needs_taps = False
        for block, span in zip(blocks, plan.spans, strict=True):
            token_ids[span.real] = block.token_ids
            sampled = block.sampled
            needs_logits |= block.wanted_logits > 0
            needs_taps |= block.needs_taps
            count = max(block.wanted_logits, sampled)
            if count and block.kv.takes_room:
                asked_of.append((len(ends), block))
            aligned = _aligned_queries(span, count)
            ends.append(len(wanted) + (span.real.stop - aligned.start if count else 0))
            wanted.extend(aligned)
            if block.sampler is not None:
                drawn.append(block.draw(block.sampler, ends[-1], span.end))
        tap_layers = self._tap_layers if needs_taps else ()
        draws, checks = Draws(drawn), _Checks(asked_of) if asked_of else None
        lap = partial(self._lap, "forward")
        on_computed = lap if checks is None else partial(checks.ask, lap)
        step = Step(token_ids, plan, wanted, tap_layers, draws, on_computed, needs_logits)
        return _Planned(blocks, step, draws, ends, checks)


def _stage(blocks: Sequence[Block]) -> None:
    for index, block in enumerate(blocks):
        try:
            block.kv.stage(len(block.token_ids), block.generated)
        except InvariantViolated as violation:
            raise BlockFailed(index, violation) from violation
        except RestorationFailed as failure:
            raise SpanFailed(index, failure) from failure


def discard(blocks: Sequence[Block]) -> None:
    """Take back what is staged. A device that fails at it is not an error."""
    for block in blocks:
        # It may have failed the forward before; the sessions' tables are correct all the same.
        with contextlib.suppress(RuntimeError):
            block.kv.discard_staged()


def _agreeing(block: Block, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples up to the first that is not the draft token in its place, that one included."""
    if not block.drafted:
        return tuple(samples)
    for count, (sample, draft_token) in enumerate(zip(samples, block.draft_tokens, strict=False), start=1):
        if sample.token_id != draft_token or not sample.is_finite:
            return tuple(samples[:count])
    return tuple(samples)


def _aligned_queries(span: StagedQueries, count: int) -> range:
    """The packed tokens, in whole quanta, that contain the span's last `count` tokens."""
    if not count:
        return range(0)
    start, quantum = span.packed.start, span.quantum
    first = start + (span.real.stop - count - start) // quantum * quantum
    return range(first, start - (start - span.real.stop) // quantum * quantum)
