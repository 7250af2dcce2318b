"""After a step: its tokens are recorded in the history, its KV entries committed, its events sent. In this order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from inference_engine.decode.verifier import Block, Outcome
from inference_engine.errors import InvariantViolated, NonFiniteLogits, QuotaExceeded, RestorationFailed
from inference_engine.kernels.sampling import Sample
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.lifecycle import Endings
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.scheduler.speculation import Speculation
from inference_engine.session.journal import Logprobs
from inference_engine.session.store import SessionStore
from inference_engine.types import Failed, Mark, Progress, StopReason, Truncated

logger = logging.getLogger(__name__)


class StepResults:
    """Engine's thread."""

    def __init__(
        self,
        store: SessionStore,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        endings: Endings,
        speculation: Speculation,
    ) -> None:
        self._lock = store.locked()
        self._histories = store.histories
        self._metrics = metrics
        self._clock = clock
        self._endings = endings
        self._learns = None if type(speculation) is Speculation else speculation.settle  # which learns nothing
        self._reported = 0  # tokens that are not counted yet

    def settle(
        self, batch: Sequence[Request], blocks: Sequence[Block], outcomes: Sequence[Outcome], *, is_committed: bool
    ) -> None:
        """Settle a step: the histories first, then, request by request, the KV entries and the events for the client.

        A request that fails ends alone. is_committed: the entries of a step of one token each are committed already,
        because a step was launched behind it. A stop that was asked for meanwhile takes effect after the sample: the
        entry could not be taken back.
        """
        recorded: list[tuple[int, Sequence[Sample]] | Exception] = []
        with self._lock:
            for request, block, outcome in zip(batch, blocks, outcomes, strict=True):
                try:
                    recorded.append(self._record(request, block, outcome, is_committed=is_committed))
                except Exception as error:
                    recorded.append(error)
        now = self._clock()
        for request, block, outcome, done in zip(batch, blocks, outcomes, recorded, strict=True):
            try:
                if isinstance(done, Exception):
                    if not is_committed:
                        request.session.kv.discard_staged()
                    raise done
                self._settle(request, block, outcome, *done, now, is_committed=is_committed)
            except Exception as error:
                if isinstance(error, InvariantViolated):
                    self._endings.fail_session(request, error)
                elif isinstance(error, QuotaExceeded):
                    self._endings.end(request, Failed(error))
                else:
                    self._endings.fail_all([request], error)

    def _record(
        self, request: Request, block: Block, outcome: Outcome, *, is_committed: bool
    ) -> tuple[int, Sequence[Sample]]:
        """Record the samples, unless the request was stopped while the step ran. The store is locked.

        Returns how many of the block's entries to keep, and the recorded samples. An entry whose sample was not
        recorded is not kept: the next Generate needs the logits that were computed with it.
        """
        session, tokens = request.session, len(block.token_ids)
        is_stopped = session.is_closed or (request.stop is not None and not is_committed)
        if block.sampler is not None:
            taken: Sequence[Sample] = outcome.samples
            if len(taken) > 1 or not taken[0].is_finite:
                taken = _up_to_stop(taken, request.stop_ids)
            if not taken:
                return 0, ()
            if request.matching is not None:
                taken = taken[: request.matching.end_draw()]
            if not is_stopped and session.history.length + len(taken) > session.granted_length:
                taken = taken[: self._histories.room(session, len(taken))]
            if is_stopped or not taken:
                request.secured_length = 0  # it is looked at again before its next step
                return block.kv.keepable(tokens - block.drafted - 1), ()
            if request.stops is not None and (found := request.stops.find([sample.token_id for sample in taken])):
                taken, request.stopped_by = taken[: found.tokens], found.which
            if len(taken) == 1:
                ids = np.array((taken[0].token_id,), dtype=np.uint32)
            else:
                ids = np.array([sample.token_id for sample in taken], dtype=np.uint32)
            logprobs = _logprobs(taken) if request.params.logprobs else None
            session.record(ids, Mark.GENERATED, began=request.began, logprobs=logprobs)
            request.began, request.last_ids = None, ids[-1:]
            if request.matching is not None and taken[-1].token_id not in request.stop_ids:
                request.matching.advance(ids.tolist())
            if request.stops is not None:
                request.stops.advance(ids.tolist())
            return tokens - block.drafted + len(taken) - 1, taken
        if outcome.logits is not None and request.forced is not None and not request.has_recorded_forced:
            if is_stopped:
                return block.kv.keepable(tokens - 1), ()
            # Again: other calls of the owner may have taken places since it began.
            self._histories.check(session, len(request.forced.token_ids))
            session.record(request.forced.token_ids, Mark.GENERATED, began=request.began)
            request.began = None
            request.has_recorded_forced = True
            request.prefill_tokens += len(request.forced.token_ids) - 1
        return tokens, ()

    def _settle(
        self,
        request: Request,
        block: Block,
        outcome: Outcome,
        kept: int,
        taken: Sequence[Sample],
        now: float,
        *,
        is_committed: bool,
    ) -> None:
        session, kv, samples = request.session, request.session.kv, outcome.samples
        failure = None
        # Entries are computed again before the first token, if at all.
        first = kv.length - is_committed if request.generated else kv.next_position
        is_replayed = first < kv.length and not is_committed
        if not is_committed:
            try:
                taps = outcome.taps if kv.reads_taps else None
                session.commit(first + kept, None if taps is None else taps[:kept])
            except InvariantViolated:
                raise
            except Exception as failed:
                # The history stays, and the tokens that joined it are reported before the failure is.
                is_old = isinstance(failed, RestorationFailed)
                what = "old KV entries could not be archived" if is_old else "KV entries could not be kept"
                logger.exception("%s", what)
                self._endings.forget_entries(session)
                failure = failed
        elif taken:
            session.refresh_facts()
        elif samples[0].is_finite and not session.is_closed:
            # Another call of the owner took the last place. The logits that come next are computed with that entry.
            session.forget_entries()
        if block.drafted:
            self._count_draft(request, block.drafted, min(len(samples) - 1, len(taken)))
        if not is_replayed and self._learns is not None:
            self._learns(request, block, outcome, first=first, kept=kept, taken=len(taken))
        if not request.generated:
            request.prefilled_tokens += kept
            self._metrics.prefilled_tokens.inc(kept)
            request.trace.note("chunk", tokens=kept)
            request.listener(Progress(request.prefilled_tokens, request.prefill_tokens))
        if outcome.logits is not None and kept:
            self._report_logits(request, first + kept, outcome.logits)
        if taken:
            self._report_tokens(request, taken, now)
        if request.state is not RequestState.RUNNING:
            return
        if samples and not samples[-1].is_finite:
            self._metrics.non_finite_logits.inc()
            # Some entry of the session may be the cause. It must not be read again.
            self._endings.invalidate_entries(session)
            self._endings.end(request, Failed(NonFiniteLogits(len(session.history))))
        elif isinstance(failure, RestorationFailed):
            self._endings.end(request, Failed(failure))
        elif failure is not None:
            raise failure
        elif not request.params.max_tokens and not request.pending_tokens:
            self._note_prefill(request, now)
            self._endings.end(request, request.finished(StopReason.MAX_TOKENS, now))

    def _count_draft(self, request: Request, drafted: int, accepted: int) -> None:
        """accepted: the Generate may have been stopped, or have ended among them."""
        for counter in (request, request.session):
            counter.drafted_tokens += drafted
            counter.accepted_tokens += accepted
        self._metrics.drafted_tokens.inc(drafted)
        self._metrics.accepted_tokens.inc(accepted)
        self._metrics.acceptance_length.observe(accepted + 1)
        request.trace.note("verify", drafted=drafted, accepted=accepted)

    def _report_logits(self, request: Request, position: int, logits: Tensor) -> None:
        """Pass on the logits of a block whose last token predicts the one at `position`."""
        assert request.forced is not None
        request.last_query = position - 1
        request.forced.on_logits(position - len(logits) + 1, logits)
        if not request.pending_tokens:
            self._endings.end(request, request.finished(StopReason.MAX_TOKENS, self._clock()))

    def _report_tokens(self, request: Request, samples: Sequence[Sample], now: float) -> None:
        """Report the tokens that were appended to the history, and end the Generate with its last one."""
        count = len(samples)
        position = request.session.history.length - count
        if request.generated:
            self._metrics.note_gap((now - request.token_at, count))
        else:
            self._report_first(request, position, now)
        request.token_at = now
        looking = request.sampler if request.sampler is not None and request.sampler.looks_back else None
        for token_id, logprob, _, tops in samples:
            request.last_query = position - 1
            request.generated += 1
            self._reported += 1
            if looking is not None:
                looking.observe(token_id)
            request.on_token(request, token_id, position, logprob, tops)
            position += 1
        # Whether a constrained one's tokens fit its grammar is known a moment later; the loop ends it then.
        reason = None if request.matching is not None else request.reached_limit
        if samples[-1].token_id in request.stop_ids:
            reason = StopReason.EOS
        if reason is not None:
            self._endings.end(request, request.finished(reason, now))

    def _report_first(self, request: Request, position: int, now: float) -> None:
        """The first token is about to be reported."""
        self._note_prefill(request, now)
        self._metrics.first_token_seconds.observe(now - request.accepted_at)
        request.trace.enter("decode")
        kv = request.session.kv
        if dropped := kv.strategy.evicted(kv.context.geometry, position - 1):
            request.listener(Truncated(dropped))

    def _note_prefill(self, request: Request, now: float) -> None:
        """It is complete."""
        request.prefill_seconds = now - request.started_at
        self._metrics.prefill_seconds.observe(request.prefill_seconds)
        if request.prefill_seconds > 0:
            self._metrics.prefill_rate.observe(request.prefilled_tokens / request.prefill_seconds)

    def count_reported(self) -> None:
        """Count the tokens that were reported: now and then, but before an end is reported."""
        reported, self._reported = self._reported, 0
        self._metrics.generated_tokens.inc(reported)


def _up_to_stop(samples: Sequence[Sample], stop_ids: frozenset[int]) -> Sequence[Sample]:
    """The finite samples up to the first that ends the Generate, that one included."""
    for count, sample in enumerate(samples):
        if not sample.is_finite:
            return samples[:count]
        if sample.token_id in stop_ids:
            return samples[: count + 1]
    return samples


def _logprobs(samples: Sequence[Sample]) -> Logprobs:
    """As a journal keeps them."""
    if not samples[0].top_logprobs:
        return np.array([sample.logprob for sample in samples], dtype=np.float32)
    numbers = [(sample.logprob, *itertools.chain(*sample.top_logprobs)) for sample in samples]
    return np.array(numbers, dtype=np.float32)
