"""After a step: its tokens are recorded in the history, its KV entries committed, its events sent. In this order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from inference_engine.decode.verifier import Block, Outcome
from inference_engine.errors import InvariantViolated, NonFiniteLogits, RestorationFailed
from inference_engine.kernels.sampling import Sample
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.lifecycle import Endings
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.scheduler.speculation import Speculation
from inference_engine.session.history import TokenIds
from inference_engine.session.journal import Logprobs
from inference_engine.session.session import Session
from inference_engine.session.store import SessionStore
from inference_engine.types import Failed, Mark, Progress, StopReason, Truncated

logger = logging.getLogger(__name__)


class Settling:
    """Engine's thread."""

    def __init__(
        self,
        store: SessionStore,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        endings: Endings,
        speculation: Speculation,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._endings = endings
        self._speculation = speculation
        # Of tokens that are not counted yet: how many, and the seconds between them and those before.
        self._reported = 0
        self._gaps: list[float] = []

    def settle_each(self, batch: Sequence[Request], blocks: Sequence[Block], outcomes: Sequence[Outcome]) -> None:
        """Settle a step, request by request: one that fails ends alone."""
        for request, block, outcome in zip(batch, blocks, outcomes, strict=True):
            try:
                self.settle(request, block, outcome)
            except Exception as error:
                self._fail(request, error)

    def settle(self, request: Request, block: Block, outcome: Outcome) -> None:
        """Commit the result of this step: the history first, then the KV entries, then the events for the client."""
        session, kv = request.session, request.session.kv
        first = kv.next_position
        is_replayed = first < kv.length
        try:
            kept, taken = self._accept(request, block, outcome)
        except BaseException:
            kv.commit(first)
            raise
        failure = self._commit(session, first + kept)
        if not is_replayed:
            self._speculation.settle(request, block, outcome, first=first, kept=kept, taken=len(taken))
        if request.is_prefilling:
            request.prefilled_tokens += kept
            self._metrics.prefilled_tokens.inc(kept)
            request.trace.note("chunk", tokens=kept)
            request.listener(Progress(request.prefilled_tokens, request.prefill_tokens))
        if outcome.logits is not None and kept:
            self._report_logits(request, first + kept, outcome.logits)
        self._report_tokens(request, taken, self._clock())
        self._refuse_not_finite(request, outcome)
        if failure is not None and request.state is RequestState.RUNNING:
            if isinstance(failure, RestorationFailed):
                self._endings.end(request, Failed(failure))
            else:
                self._fail(request, failure)

    def settle_committed(
        self, batch: Sequence[Request], blocks: Sequence[Block], outcomes: Sequence[Outcome], ids: TokenIds
    ) -> None:
        """As `settle`, of a whole step of one token each whose entries are committed already, because a step was
        launched behind it.

        ids: [batch], of its samples. A stop that was asked for meanwhile takes effect after the sample: the entry could
        not be taken back.
        """
        now = self._clock()
        recorded = self._record_each(batch, outcomes, ids)
        for request, block, outcome, is_recorded in zip(batch, blocks, outcomes, recorded, strict=True):
            session, sample = request.session, outcome.samples[0]
            try:
                if isinstance(is_recorded, Exception):
                    raise is_recorded
                if is_recorded:
                    session.refresh_facts()
                elif sample.is_finite and not session.is_closed:
                    # Another call of the owner took the last place. The logits that come next are computed with that
                    # entry.
                    session.forget_entries()
                first = session.kv.length - 1
                self._speculation.settle(request, block, outcome, first=first, kept=1, taken=int(is_recorded))
                if is_recorded:
                    self._report(request, sample, session.history.length - 1, now)
                    self._end_if_done(request, sample.token_id, now)
                else:
                    self._refuse_not_finite(request, outcome)
            except Exception as error:
                self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        if isinstance(error, InvariantViolated):
            self._endings.fail_session(request, error)
        else:
            self._endings.fail_all([request], error)

    def _record_each(
        self, batch: Sequence[Request], outcomes: Sequence[Outcome], ids: TokenIds
    ) -> list[bool | Exception]:
        """Record the token of each request, if there is one and its session is open and has room for it. Of each
        whether it was recorded, or why it could not be."""
        recorded: list[bool | Exception] = []
        has_room = self._store.histories.has_room
        with self._store.locked():
            for index, (request, outcome) in enumerate(zip(batch, outcomes, strict=True)):
                session = request.session
                if outcome.samples[0].is_finite and not session.is_closed and has_room(session, 1):
                    logprobs = _logprobs(outcome.samples) if request.params.logprobs else None
                    try:
                        token_ids = ids[index : index + 1]
                        session.record(token_ids, Mark.GENERATED, began=request.began, logprobs=logprobs)
                    except Exception as error:
                        recorded.append(error)
                        continue
                    request.began = None
                    recorded.append(True)
                else:
                    recorded.append(False)
        return recorded

    def _refuse_not_finite(self, request: Request, outcome: Outcome) -> None:
        """End the Generate if its last logits were no numbers."""
        if not outcome.samples or outcome.samples[-1].is_finite or request.state is not RequestState.RUNNING:
            return
        self._metrics.non_finite_logits.inc()
        # Some entry of the session may be the cause. It must not be read again.
        self._endings.distrust_entries(request.session)
        self._endings.end(request, Failed(NonFiniteLogits(len(request.session.history))))

    def _commit(self, session: Session, length: int) -> Exception | None:
        """Commit the session's entries. If that fails, all are dropped: the history stays, and the tokens that joined
        it are reported before the failure is."""
        try:
            session.kv.commit(length)
        except InvariantViolated:
            raise
        except Exception as failed:
            is_old = isinstance(failed, RestorationFailed)
            logger.exception("%s", "old KV entries could not be archived" if is_old else "KV entries could not be kept")
            self._endings.forget_entries(session)
            return failed
        session.refresh_facts()
        return None

    def _accept(self, request: Request, block: Block, outcome: Outcome) -> tuple[int, Sequence[Sample]]:
        """Record the samples, unless the request was stopped while the step ran.

        Returns how many of the block's entries to keep, and the recorded samples. An entry whose sample was not
        recorded is not kept: the next Generate needs the logits that were computed with it.
        """
        tokens, session = len(block.token_ids), request.session
        if block.sampler is not None:
            taken = _up_to_stop(outcome.samples, request.stop_ids)
            if not taken:
                return 0, ()
            with self._store.locked():
                if session.is_closed or request.stop is not None:
                    return tokens - block.drafted - 1, ()
                taken = taken[: self._store.histories.room(session)]
                if not taken:
                    return tokens - block.drafted - 1, ()
                ids = np.array([sample.token_id for sample in taken], dtype=np.uint32)
                logprobs = _logprobs(taken) if request.params.logprobs else None
                session.record(ids, Mark.GENERATED, began=request.began, logprobs=logprobs)
                request.began = None
            return tokens - block.drafted + len(taken) - 1, taken
        if outcome.logits is not None and request.forced is not None and not request.has_recorded_forced:
            with self._store.locked():
                if session.is_closed or request.stop is not None:
                    return tokens - 1, ()
                session.record(request.forced.token_ids, Mark.GENERATED, began=request.began)
                request.began = None
                request.has_recorded_forced = True
                request.prefill_tokens += len(request.forced.token_ids) - 1
        return tokens, ()

    def _report_logits(self, request: Request, position: int, logits: Tensor) -> None:
        """Pass on the logits of a block whose last token predicts the one at `position`."""
        assert request.forced is not None
        request.last_query = position - 1
        request.forced.on_logits(position - len(logits) + 1, logits)
        if not request.pending_tokens:
            self._endings.end(request, request.finished(StopReason.MAX_TOKENS, self._clock()))

    def _report_tokens(self, request: Request, samples: Sequence[Sample], now: float) -> None:
        """Report the tokens that were appended to the history."""
        if not samples:
            return
        position = len(request.session.history) - len(samples)
        if request.generated == 0:
            self._report_first(request, position, now)
        for sample in samples:
            self._report(request, sample, position, now)
            position += 1
        self._end_if_done(request, samples[-1].token_id, now)

    def _report(self, request: Request, sample: Sample, position: int, now: float) -> None:
        token_id, logprob, _ = sample
        if request.generated:
            self._gaps.append(now - request.token_at)
        request.token_at = now
        request.last_query = position - 1
        request.generated += 1
        self._reported += 1
        assert request.sampler is not None
        if request.sampler.seen is not None:
            request.sampler.observe(token_id)
        request.on_token(request, token_id, position, logprob)

    def _end_if_done(self, request: Request, token_id: int, now: float) -> None:
        """End the Generate if this was its last token."""
        if reason := self._stop_reason(request, token_id):
            self.count_reported()
            self._endings.end(request, request.finished(reason, now))

    def _report_first(self, request: Request, position: int, now: float) -> None:
        """The first token is about to be reported."""
        request.prefill_seconds = now - request.started_at
        self._metrics.prefill_seconds.observe(request.prefill_seconds)
        if request.prefill_seconds > 0:
            self._metrics.prefill_rate.observe(request.prefilled_tokens / request.prefill_seconds)
        self._metrics.first_token_seconds.observe(now - request.accepted_at)
        request.trace.enter("decode")
        if dropped := self._unreadable(request.session, position - 1):
            request.listener(Truncated(dropped))

    def count_reported(self) -> None:
        """Count the tokens that were reported: once for all of a step, but before an end is reported."""
        reported, self._reported = self._reported, 0
        gaps, self._gaps = self._gaps, []
        self._metrics.generated_tokens.inc(reported)
        self._metrics.inter_token_seconds.observe_all(gaps)

    @staticmethod
    def _unreadable(session: Session, query: int) -> int:
        return session.kv.strategy.evicted(session.kv.context.geometry, query)

    @staticmethod
    def _stop_reason(request: Request, token_id: int) -> StopReason | None:
        session = request.session
        if token_id in request.stop_ids:
            return StopReason.EOS
        if request.generated >= request.params.max_tokens:
            return StopReason.MAX_TOKENS
        longest = session.longest
        if longest is not None and session.history.length >= longest:
            return StopReason.TRUNCATED
        return None


def _up_to_stop(samples: Sequence[Sample], stop_ids: frozenset[int]) -> Sequence[Sample]:
    """The finite samples up to the first that ends the Generate, that one included."""
    for count, sample in enumerate(samples):
        if not sample.is_finite:
            return samples[:count]
        if sample.token_id in stop_ids:
            return samples[: count + 1]
    return samples


def _logprobs(samples: Sequence[Sample]) -> Logprobs:
    return np.array([sample.logprob for sample in samples], dtype=np.float32)
