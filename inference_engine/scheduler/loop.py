"""The loop: the one thread that owns the device. It takes requests in, runs steps, commits, and reports.

Everything it shares with other threads goes through the store's lock, a queue, or frozen events. A request's error
ends that request only; a step's error ends the requests that were in it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.decode.constraints import Constraints
from inference_engine.decode.draft import Drafter, NoDrafter, TokenIds
from inference_engine.decode.matching import begin_all
from inference_engine.decode.verifier import Block, BlockFailed, InFlight, Outcome, Verifier, discard
from inference_engine.errors import (
    ConstraintFailed,
    Draining,
    InternalError,
    QuotaExceeded,
    RequestError,
    SessionClosed,
    SessionElsewhere,
)
from inference_engine.kv.plan import SpanFailed, StepUnwanted
from inference_engine.metrics import EngineMetrics
from inference_engine.scheduler.arrivals import Arrivals, by_owner
from inference_engine.scheduler.batching import Batching
from inference_engine.scheduler.commit import StepResults
from inference_engine.scheduler.lifecycle import Beginnings, Endings, is_out_of_memory
from inference_engine.scheduler.policy import admit
from inference_engine.scheduler.request import Request, RequestState
from inference_engine.scheduler.sharing import Sharing
from inference_engine.scheduler.speculation import Drafting, Speculation, draft_forced, most_draft_tokens
from inference_engine.scheduler.step_time import StepTimer
from inference_engine.scheduler.stream_notify import StreamNotifier
from inference_engine.session.journal import Journal
from inference_engine.session.snapshots import NoSnapshots, OpenSnapshots
from inference_engine.session.store import SessionStore
from inference_engine.types import Accepted, Failed, StopReason

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0  # between two rounds, if nothing asks for one
_HOUSEKEEPING_SECONDS = 0.05
_DRAFT_TOKENS = 16  # draft tokens that a session is granted memory for at most, if any is free
_MATCHING_SECONDS = 0.0005  # between two looks whether a constraint's worker is done
_CLEAN_BYTES = 32 * 2**20  # of memory given back, zeroed before a step: a few milliseconds on a CPU
_BEHIND_SECONDS = 0.02  # between two looks whether the journal has caught up
_STUCK_SECONDS = 30.0  # a step that takes longer does not block a shutdown


@dataclass(slots=True)
class Flight:
    """A step on the device, one token for each of its requests, which the host has not waited for.

    ids: of its tokens, filled in once the step before is settled, and used again by the step behind; None: they were
    known when it was launched.
    is_committed: its entries are committed already, and a step behind it was launched or could not be.
    """

    batch: Sequence[Request]
    step: InFlight
    began: float
    ids: TokenIds | None
    is_committed: bool = False


class Scheduler:
    """`submit` from any thread; everything else happens on the loop's own."""

    THREAD_NAME = "kakeya-engine"

    def __init__(
        self,
        verifier: Verifier,
        store: SessionStore,
        journal: Journal,
        metrics: EngineMetrics,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        vocab_size: int,
        timer: StepTimer,
        drafter: Drafter,
        constraints: Constraints,
        open_snapshots: OpenSnapshots = NoSnapshots,
    ) -> None:
        """open_snapshots: makes what saves and reads copies of K/V, which calls back when there is more to do."""
        self._verifier = verifier
        self._timer = timer
        self._store = store
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._speculation = Speculation()
        if not isinstance(drafter, NoDrafter):
            self._speculation = Drafting(
                drafter, metrics, clock, vocab_size=vocab_size, draft_tokens=config.draft_tokens, lap=timer.lap
            )
        self._journal = journal
        self._keeps = journal.keeps
        self.notifier = StreamNotifier(journal.on_saved, journal.request_sync) if journal.keeps else StreamNotifier()
        self.snapshots = open_snapshots(self.wake)
        self._sharing = Sharing(store, metrics)
        self._endings = Endings(store, metrics, self._sharing, self._speculation, self._leave, self.snapshots)
        self._beginnings = Beginnings(
            self._sharing,
            metrics,
            clock,
            self._endings,
            self.notifier,
            self._enter,
            vocab_size=vocab_size,
            snapshots=self.snapshots,
            constraints=constraints,
        )
        self._batching = Batching(config, clock, self._speculation)
        self._results = StepResults(store, metrics, clock, self._endings, self._speculation)
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._tasks: deque[Callable[[], None]] = deque()
        self._queued: deque[Request] = deque()  # in order of arrival
        self._running: deque[Request] = deque()  # longest unserved first
        self._constrained: set[Request] = set()  # of the running ones
        self._arrivals = Arrivals(config, metrics, clock)
        self._last_step: tuple[float, int] | None = None  # when it began, and its tokens, if the next one follows it
        self._overlaps = verifier.launches_ahead(config.overlap)
        self._flight: Flight | None = None  # the step on the device, if it was launched ahead
        self._landed_at = 0.0  # when the last such step was done
        self._is_caught_up = True  # is the device done with all steps so far?
        self._changes = 0  # of what waits: requests came or went, or a round is over
        self._is_ending = False  # has a request left in this round, whose end may not be reported yet?
        self._is_draining = False
        self._is_stopping = False
        self.beat_at = clock()  # when the loop last came round
        self._tidied_at = -math.inf
        self.failed_steps = 0  # consecutive forwards that raised
        self._thread = threading.Thread(target=self._run, name=self.THREAD_NAME, daemon=True)

    # -- other threads ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, *, refuse_late: bool = False) -> None:
        """Queue a request whose session it holds. Raises Overloaded or Draining, and then the session is not freed.

        refuse_late: if it would wait for more than `max_first_token_seconds` for other owners, refuse it.
        """
        # Before the lock: these take that of the store. Those that come later find it.
        found = self._sharing.foresee(request.session, self.requests())
        self._sharing.enter(request.session)
        with self._lock:
            if not self._thread.is_alive():
                raise InternalError("engine-thread-ended")
            if self._is_draining or self._is_stopping:
                self._metrics.refused.labels("draining").inc()
                raise Draining
            request.prefill_tokens = request.foreseen_tokens(found)
            ahead = self._arrivals.places_ahead(request.session.owner, self._running, self._queued)
            self._arrivals.foresee(
                request,
                self._running,
                self._queued,
                changes=self._changes,
                is_alone=not ahead,
                refuse_late=refuse_late,
            )
            # Sent before the loop can see the request, so that it is the first event.
            request.listener(Accepted(ahead, request.prefill_tokens))
            self._queued.append(request)
            self._changes += 1
            self._wake.notify_all()

    def between_steps(self, task: Callable[[], None]) -> None:
        """Run `task` on the loop's thread, soon, and before any request that is submitted later. It must not raise."""
        with self._lock:
            if not self._thread.is_alive():
                raise InternalError("engine-thread-ended")
            if self._is_stopping:
                raise Draining
            self._tasks.append(task)
            self._wake.notify_all()

    def wake(self) -> None:
        """Wake the loop: a stop was requested."""
        with self._lock:
            self._wake.notify_all()

    def drain(self, grace_seconds: float) -> None:
        """Refuse new requests; wait for those in flight; after the grace, end them with Draining."""
        with self._lock:
            self._is_draining = True
            if self._wake.wait_for(self._is_done, timeout=grace_seconds):
                return
            for request in (*self._queued, *self._running):
                request.ask_to_stop(Draining)
            self._wake.notify_all()
            self._wake.wait_for(self._is_done, timeout=_STUCK_SECONDS)

    def stop(self) -> None:
        """End everything with Draining and join the thread."""
        self.drain(0.0)
        with self._lock:
            self._is_stopping = True
            self._wake.notify_all()
        self._thread.join(timeout=_STUCK_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def has_work(self) -> bool:
        return not self._is_idle()

    def _is_idle(self) -> bool:
        return not self._queued and not self._running and not self._tasks

    def _is_done(self) -> bool:
        """Idle, and every end is complete: its session is free and its last event was sent."""
        return self._is_idle() and not (self._is_ending and self._thread.is_alive())

    def requests(self) -> tuple[Request, ...]:
        """Those in flight, waiting ones included."""
        with self._lock:
            return (*self._queued, *self._running)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_clean = True
        while True:
            if not self._running:
                self.notifier.release()  # it is not known when the device works again
                self._verifier.forget_plan()
            with self._lock:
                self._is_ending = False
                self._changes += 1
                if self._is_idle():
                    self._wake.notify_all()
                    if self._is_stopping:
                        return
                    self._wake.wait(timeout=_IDLE_SECONDS if is_clean else 0)
                    self._last_step = None
                # Together: a request that was submitted after a task must not begin before it.
                tasks, waiting = len(self._tasks), list(self._queued)
            if waiting:
                waiting = self._beginnings.that_may_begin(waiting)
            if tasks:
                self.notifier.release()  # they may take a while
            self.beat_at = now = self._clock()
            try:
                if self._flight is not None and self._has_to_land(waiting, has_tasks=tasks > 0):
                    self._land()
                    self.notifier.release()  # no step is on the device, and what follows may take a while
                for _ in range(tasks):
                    self._run_task()
                if not is_clean or not self._running or now - self._tidied_at >= _HOUSEKEEPING_SECONDS:
                    is_clean, self._tidied_at = self._keep_house(), now
                self._end_stopped()
                if waiting:
                    waiting = [request for request in waiting if request.state is RequestState.QUEUED]
                    chosen = [waiting[index] for index in self._admitted(waiting)]
                    self._beginnings.begin_all(chosen, self._running)
                self._step()
            except Exception as error:
                # A bug outside any request: nothing in flight can be trusted to continue.
                self._flight = None
                self._endings.fail_all(self.requests(), error)

    def _keep_house(self) -> bool:
        """What waits for a moment between two steps, a little of it. Is all of it done?"""
        self._results.count_reported()
        self._metrics.count_steps()
        is_clean = not self._verifier.context.pool.clean(_CLEAN_BYTES)
        is_clean &= not self._store.expire()
        return is_clean & (not self.snapshots.poll())

    def _run_task(self) -> None:
        """The oldest one. It counts as work until it is done, and waits for the next round if this one fails before."""
        try:
            self._tasks[0]()
        finally:
            with self._lock:
                self._tasks.popleft()

    def _end_stopped(self) -> None:
        for request in (*self._queued, *self._running):
            if request.session.is_closed:
                closed = SessionElsewhere(is_pending=True) if request.session.is_lost else SessionClosed()
                self._endings.end(request, Failed(closed))
            elif request.stop is not None and not request.is_waiting_for_verdict:
                self._endings.end(request, request.ending(request.stop(), self._clock()))

    def _admitted(self, waiting: Sequence[Request]) -> Sequence[int]:
        """Which of them there is a place for now, by index."""
        owners = [request.session.owner for request in waiting]
        most, most_per_owner = self._config.max_running, self._config.max_running_per_owner
        return admit(owners, by_owner(self._running), most=most, most_per_owner=most_per_owner)

    def _step(self) -> None:
        """One step, or, where steps are launched ahead: launch the next one, then settle the one before it."""
        if self._flight is not None:
            self._go_on(self._flight)
            return
        if self._keeps and self._journal.is_behind():
            self.notifier.release()  # of the step before, whose commit they ask for
            time.sleep(_BEHIND_SECONDS)  # nothing of one more step could be sent
            self._last_step = None
            return
        if self._constrained:
            begin_all([request.matching for request in self._constrained if request.matching is not None])
        requests = [
            request
            for request in list(self._running)
            if (request.matching is None or self._may_go_on(request))
            and (request.session.history.length <= request.secured_length or self._is_secured(request))
        ]
        last, self._last_step = self._last_step, None
        if not requests:
            if self._running:
                time.sleep(_MATCHING_SECONDS)  # workers look at their tokens
            return
        step_began = self._timer.begin()
        chosen = self._batching.choose(requests)
        batch = list(chosen)
        first = [request for request in batch if not request.generated]
        is_decoding = not first
        drafts: dict[Request, TokenIds] = {}
        if is_decoding:
            tokens_left = self._config.step_tokens - len(batch)
            draft = partial(draft_forced, self._speculation) if self._constrained else self._speculation.draft
            drafts = draft(batch, tokens_left, on_work=self.notifier.release)
        blocks = [self._batching.block(request, tokens, drafts.get(request)) for request, tokens in chosen.items()]
        began = self._clock()
        try:
            launches = self._overlaps and is_decoding and self._can_launch(batch, blocks)
            # A decode step is short. Among others one that has stopped waits for them.
            is_wanted = None if is_decoding else partial(_are_wanted, batch)
            outcomes = self._verifier.start(
                blocks, launches=launches, on_planned=self.notifier.release, is_wanted=is_wanted
            )
        except StepUnwanted:
            return
        except BlockFailed as failed:
            self._endings.fail_session(batch[failed.index], failed.violation)
            return
        except SpanFailed as failed:
            self._end_unrestored(batch[failed.index], failed)
            return
        except Exception as error:
            self._fail_step(batch, error)
            return
        if isinstance(outcomes, InFlight):
            self._flight = Flight(batch, outcomes, began, None)
            return
        has_waited = self._verifier.waits(blocks)
        self._timer.lap("sample")
        seconds, tokens = self._clock() - began, sum(chosen.values()) + sum(map(len, drafts.values()))
        if self._note_step(batch, tokens, seconds, is_decoding=is_decoding, has_waited=has_waited):
            self._last_step = step_began, tokens
        turn = self._config.segment_tokens
        served = batch if is_decoding else [each for each in batch if not each.is_within_turn(chosen[each], turn)]
        self._move_back(served, None if last is None else (last[1], step_began - last[0]))
        self._settle(batch, blocks, outcomes, first=first)

    def _may_go_on(self, request: Request) -> bool:
        """May a constrained request be in the next step? Ends it if its output is whole, or nothing may follow."""
        matching = request.matching
        assert matching is not None
        limit = request.reached_limit
        if not matching.is_ready:
            return not matching.is_late and limit is None
        try:
            look = matching.look(len(request.session.history))
        except ConstraintFailed as error:
            if limit is None:
                self._endings.end(request, Failed(error))
                return False
        except Exception as error:
            self._endings.fail_all([request], error)
            return False
        else:
            limit = StopReason.CONSTRAINT if look.is_over else limit
        if limit is not None:
            self._endings.end(request, request.finished(limit, self._clock()))
        return limit is None

    def _end_unrestored(self, request: Request, failed: SpanFailed) -> None:
        logger.error("a session's old KV entries could not be read", exc_info=failed, extra=request.about)
        if request.state is RequestState.RUNNING:
            self._endings.end(request, Failed(failed.failure))

    def _fail_step(self, batch: Sequence[Request], error: Exception) -> None:
        # Out of memory does not count: the next step may be smaller.
        self.failed_steps += not is_out_of_memory(error)
        self._endings.fail_all(batch, error)

    def _note_step(
        self, batch: Sequence[Request], tokens: int, seconds: float, *, is_decoding: bool, has_waited: bool
    ) -> bool:
        """A step came back after `seconds`; is that its duration? has_waited: the device is done with it."""
        self.failed_steps = 0
        # Otherwise the measured time includes work of the steps before it, or misses some of its own.
        is_known = has_waited and self._is_caught_up
        self._is_caught_up = has_waited
        if is_known:
            self._batching.took(tokens, seconds, is_decoding=is_decoding)
        self._metrics.step_tokens.note(tokens)
        self._metrics.step_sessions.note(len(batch))
        if is_decoding and is_known:
            self._speculation.took(len(batch), tokens, seconds)
        return is_known

    def _settle(
        self,
        batch: Sequence[Request],
        blocks: Sequence[Block],
        outcomes: Sequence[Outcome],
        *,
        first: Sequence[Request] = (),
        is_committed: bool = False,
    ) -> None:
        """first: those of the batch that had no token before this step."""
        self.notifier.hold()
        self._results.settle(batch, blocks, outcomes, is_committed=is_committed)
        if first:
            self._record_first_tokens(first)
        self._speculation.flush_if_many()
        self._timer.end("settle")

    # -- steps that are launched before the tokens of the one before have reached the host --------------------------

    def _can_launch(self, batch: Sequence[Request], blocks: Sequence[Block]) -> bool:
        """Does the step decode one token for each running request, drawn without a look at the tokens before it?"""
        return len(batch) == len(self._running) and all(
            block.sampled == len(block.token_ids) == 1 and block.sampler is not None and not block.sampler.looks_back
            for block in blocks
        )

    def _has_to_land(self, waiting: Sequence[Request], *, has_tasks: bool) -> bool:
        """Is there anything to do between two steps, when none is on the device?"""
        return (
            has_tasks
            or any(request.stop is not None or request.session.is_closed for request in self.requests())
            or bool(waiting and self._admitted(waiting))
        )

    def _land(self) -> None:
        """Settle the step that is on the device, and launch none behind it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._timer.begin()
            self._arrive(flight, None)

    def _go_on(self, flight: Flight) -> None:
        """Launch the step behind it, if it is known to come, then settle it."""
        self._timer.begin()
        self._flight = None
        following = None
        try:
            following = self._follow(flight)
        except Exception as error:
            self._fail_flight(flight, error)
            return
        self._arrive(flight, following)

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch a step for the tokens that this one samples, or None: one of its requests may not go on, or only in a
        step of another kind.

        The entries that this one wrote are committed first. An error leaves nothing staged behind them.
        """
        batch = flight.batch
        if self._keeps and self._journal.is_behind():
            return None
        if not all(map(_continues, batch)):
            return None
        # Places for the token that is being sampled, and for the one behind it.
        asking = [each.session for each in batch if each.session.history.length + 2 > each.session.granted_length]
        if asking and not self._store.have_room(asking, 2):
            return None
        if not flight.step.commits_ahead:
            return None
        if not self._speculation.is_idle(batch):
            return None
        flight.is_committed = True
        for request in batch:
            request.session.kv.commit_one()
        # Only of a first step are the blocks made: those of the steps behind it are the same, with other ids.
        blocks, ids = (flight.step.blocks, flight.ids) if flight.ids is not None else self._batching.unknown(batch)
        began = self._clock()
        try:
            step = self._verifier.follow(blocks, flight.step)
        except Exception:
            # It is not the step that is to be settled now, and will be tried again as others are.
            logger.debug("no step could be launched ahead", exc_info=True)
            return None
        return None if step is None else Flight(batch, step, began, ids)

    def _arrive(self, flight: Flight, following: Flight | None) -> None:
        """Wait for a step and settle it. following: the step behind it, whose tokens are known now."""
        try:
            outcomes = flight.step.wait()
        except Exception as error:
            if following is not None:
                discard(following.step.blocks)
            self._fail_flight(flight, error)
            return
        self._timer.lap("sample")
        now = self._clock()
        began = max(flight.began, self._landed_at)
        self._landed_at = now
        batch, blocks = flight.batch, flight.step.blocks
        ids = np.array([outcome.samples[0].token_id for outcome in outcomes], dtype=np.uint32)
        failures = flight.step.failures()
        for failed in failures:
            self._end_unrestored(batch[failed.index], failed)
        if failures or not flight.is_committed:
            # A session that was freed meanwhile has taken its entry back; there is nothing to settle.
            broken = {failed.index for failed in failures}
            alive = [
                index
                for index, block in enumerate(blocks)
                if index not in broken and (flight.is_committed or block.kv.staged)
            ]
            batch, blocks = [batch[index] for index in alive], [blocks[index] for index in alive]
            outcomes = [outcomes[index] for index in alive]
        self._note_step(batch, len(flight.batch), now - began, is_decoding=True, has_waited=True)
        last, self._last_step = self._last_step, (began, len(flight.batch))
        self._move_back(
            [request for request in batch if request.state is RequestState.RUNNING],
            None if last is None else (last[1], began - last[0]),
        )
        self._settle(batch, blocks, outcomes, is_committed=flight.is_committed)
        if following is not None:
            if following.ids is not None:
                following.ids[:] = ids
            if not self._draw_behind(following):
                return
            self.notifier.release()  # the device is at work
            if any(request.state is RequestState.RUNNING for request in following.batch):
                self._flight = following

    def _draw_behind(self, flight: Flight) -> bool:
        """Have it drawn, while the device computes it: its tokens are known now, and so which ones may follow them.

        A Generate whose output is whole ends. False: the draws failed, and its requests with them.
        """
        if self._constrained:
            constrained = {request: request.matching for request in flight.batch if request.matching is not None}
            begin_all([*constrained.values()])
            for request in constrained:
                self._may_go_on(request)
        try:
            flight.step.draw()
        except Exception as error:
            self._fail_flight(flight, error)
            return False
        return True

    def _fail_flight(self, flight: Flight, error: Exception) -> None:
        """It may have left entries that cannot be trusted."""
        discard(flight.step.blocks)
        if flight.is_committed:
            for request in flight.batch:
                self._endings.forget_entries(request.session)
        self._fail_step([request for request in flight.batch if request.state is RequestState.RUNNING], error)

    def _is_secured(self, request: Request) -> bool:
        """Is there a place for its next token, and memory for those before it? If not, it ends. Both are granted for
        many tokens at once, so that it need not be asked before each.

        Draft tokens after them get memory only if some is free: no K/V is dropped for them.
        """
        session = request.session
        if request.samples:
            try:
                self._store.refuse_without_place(session)
            except QuotaExceeded as error:
                self._endings.end(request, Failed(error))
                return False
        tokens, kv = session.history.length, session.kv
        draft_tokens = min(_DRAFT_TOKENS, most_draft_tokens(request, self._speculation))
        if not kv.grant.covers(tokens + draft_tokens):
            if not (draft_tokens and kv.grant.covers(tokens)):
                try:
                    self._store.secure(session, tokens)
                except RequestError as error:
                    self._endings.end(request, Failed(error))
                    return False
            # After a refusal the next attempt is made when the next segment is granted, not at each step.
            should_grow = (
                draft_tokens > 0
                and not kv.grant.covers(tokens + draft_tokens)
                and request.refused_behind != kv.grant.tokens
            )
            if should_grow and not self._store.secure_if_free(session, tokens + draft_tokens):
                request.refused_behind = kv.grant.tokens
        if request.generated:
            request.secured_length = min(kv.grant.covered_tokens - draft_tokens, session.granted_length - 1)
        return True

    def _move_back(self, batch: list[Request], last: tuple[int, float] | None) -> None:
        """Move requests that had their turn to the end of the queue, in this order. In one go: a drain must not see it
        empty.

        last: tokens of the step before this one, and seconds from its beginning to this one's.
        """
        with self._lock:
            if last is not None:
                self._arrivals.stepped(*last)
            if list(self._running) == batch:
                return
            served = set(batch)
            others = [request for request in self._running if request not in served]
            self._running.clear()
            self._running.extend((*others, *batch))

    def _record_first_tokens(self, requests: Sequence[Request]) -> None:
        """Record the waits of those `requests` that have a token now. None had one before this step."""
        answered = [request for request in requests if request.generated]
        if answered:
            now = self._clock()
            with self._lock:
                for request in answered:
                    self._arrivals.answered(request, now)
            for request in answered:
                self.snapshots.prefilled(request.prefill_tokens, now - request.started_at)

    def _enter(self, request: Request) -> None:
        with self._lock:
            self._queued.remove(request)
            self._running.append(request)
            self._changes += 1
        if request.grammar is not None:
            self._constrained.add(request)

    def _leave(self, request: Request) -> None:
        self._results.count_reported()  # before its end is reported
        self.snapshots.idle(request.session)
        with self._lock:
            self._is_ending = True
            self._changes += 1
            if request in self._queued:
                self._queued.remove(request)
                return
            self._running.remove(request)
            self._constrained.discard(request)
            self._arrivals.ended(request)


def _are_wanted(batch: Sequence[Request]) -> bool:
    """Does any of them go on?"""
    return not all(request.stop is not None or request.session.is_closed for request in batch)


def _continues(request: Request) -> bool:
    """Will it decode another token after the one that is being sampled, unless that one ends it?"""
    session, kv = request.session, request.session.kv
    length = session.history.length + 1
    return bool(
        kv.staged
        and not session.is_closed
        and request.stop is None
        and request.generated + 1 < request.params.max_tokens
        and (request.matching is None or request.matching.goes_on(is_drafted=request.params.drafting))
        and (length <= request.secured_length or kv.grant.covers(length))
    )
