"""Continuous batching: which requests are in the next step, and how many tokens of each (chunked prefill).

`scheduler/policy.py` chooses from plain numbers. This module collects those numbers and turns the choice into a `Block`
of tokens per request for the verifier. The owner that was served longest ago comes first, for prefill and for decode
separately.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import lcm

import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.decode.draft import TokenIds
from inference_engine.decode.verifier import Block
from inference_engine.scheduler.policy import Candidate, Targets, choose, chunk_beside_decoders, cut
from inference_engine.scheduler.request import Request
from inference_engine.scheduler.speculation import Speculation
from inference_engine.scheduler.step_time import FORGETTING, ChunkPace, StepPace

Turn = tuple[str, bool]  # an owner, and whether it prefills
_GENERATED = np.ones(1, dtype=np.bool_)
_GENERATED.setflags(write=False)
_MOST_TURNS = 4096  # beyond these, the owner that was served longest ago counts as never served


class OwnerTurns:
    """The step that last served each owner. Bounded in size, for any number of owners."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: OrderedDict[Turn, int] = OrderedDict()  # served longest ago first

    def last(self, turn: Turn) -> int:
        """The number of the step that last served it; 0 for none."""
        return self._last.get(turn, 0)

    def served(self, turns: Iterable[Turn]) -> None:
        """Count one more step, which served these."""
        self._steps += 1
        for turn in turns:
            self._last[turn] = self._steps
            self._last.move_to_end(turn)
        while len(self._last) > _MOST_TURNS:
            self._last.popitem(last=False)


class Batching:
    """Engine's thread."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float], speculation: Speculation) -> None:
        self._config = config
        self._clock = clock
        self._speculation = speculation
        self._turns = OwnerTurns()
        self._pace = StepPace()
        self._chunk = ChunkPace(least_tokens=config.page_tokens)
        self._targets = Targets(
            first_token_seconds=config.first_token_target_seconds,
            inter_token_seconds=config.inter_token_target_seconds,
        )

    def choose(self, requests: Sequence[Request]) -> dict[Request, int]:
        """The requests of the next step, in order, each with its number of tokens (draft tokens not counted).

        Their turns count as taken.

        requests: the running ones, longest unserved first; at least one.
        """
        if len(requests) <= self._config.max_batch and all(map(_is_decoding, requests)):  # a fast path
            self._turns.served([(request.session.owner, False) for request in requests])
            return dict.fromkeys(requests, 1)
        turns = [_turn_of(request) for request in requests]
        prefills = [request for request, (_, is_prefilling) in zip(requests, turns, strict=True) if is_prefilling]
        decoders = len(requests) - len(prefills)
        candidates = [
            Candidate(self._tokens(request, decoders), is_prefilling, owner, self._turns.last((owner, is_prefilling)))
            for request, (owner, is_prefilling) in zip(requests, turns, strict=True)
        ]
        # Without decoders, the longest step that any of them may be part of.
        step_tokens = 0 if decoders else max(self._most_tokens(request) for request in prefills)
        beside = min(decoders, self._config.max_batch)
        chosen = choose(
            candidates,
            step_tokens=step_tokens,
            max_batch=self._config.max_batch,
            prefill_tokens_beside=min([self._prefill_tokens_beside(request, beside) for request in prefills])
            if decoders and prefills
            else 0,
        )
        self._turns.served([turns[index] for index in chosen])
        return {requests[index]: candidates[index].tokens for index in chosen}

    def took(self, tokens: int, seconds: float, *, is_decoding: bool) -> None:
        """Record that a step of `tokens` took `seconds`. After one with prefill the next chunks are as it says."""
        self._pace.saw(tokens, seconds)
        chunk = self._chunk
        if not is_decoding:
            chunk.saw(tokens, seconds)
        elif not (longest := chunk.decoding_seconds * FORGETTING) or seconds < longest:
            chunk.decoding_seconds = seconds
        else:
            chunk.decoding_seconds = longest

    def block(self, request: Request, tokens: int, draft: TokenIds | None = None) -> Block:
        """The next `tokens` tokens of the request that have no K/V yet, and `draft` behind them."""
        if draft is None and request.last_ids is not None and _is_decoding(request):  # a fast path
            return self._decoded(request, request.last_ids)
        is_last = tokens == request.pending_tokens
        wanted = tokens if request.has_recorded_forced else int(is_last and request.forced is not None)
        token_ids = request.session.pending_ids(tokens)
        # All but the last sampled token have K/V while a Generate decodes.
        is_decoded = is_last and tokens == 1 and request.generated > 0
        generated = _GENERATED if is_decoded else request.session.pending_generated(tokens)
        if draft is not None:
            token_ids = np.concatenate([token_ids, draft])
            generated = np.concatenate([generated, np.ones(len(draft), dtype=np.bool_)])
        kv, speculation = request.session.kv, self._speculation
        reads_taps = kv.reads_taps or (speculation.has_taps and speculation.needs_taps(request))
        return Block(
            kv=kv,
            token_ids=token_ids,
            generated=generated,
            drafted=0 if draft is None else len(draft),
            sampler=request.sampler if is_last else None,
            needs_logprob=request.params.logprobs,
            top_logprobs=request.params.top_logprobs,
            wanted_logits=wanted,
            needs_taps=reads_taps and not kv.pending_replay,
        )

    def unknown(self, requests: Sequence[Request]) -> tuple[list[Block], TokenIds]:
        """As `block`, for the token that is being sampled for each request: their blocks, and the memory of their ids,
        which are 0 until they are known.
        """
        ids = np.zeros(len(requests), dtype=np.uint32)
        return [self._decoded(request, ids[index : index + 1]) for index, request in enumerate(requests)], ids

    def _decoded(self, request: Request, token_ids: TokenIds) -> Block:
        """Of the last token that was sampled, [1]."""
        kv, speculation = request.session.kv, self._speculation
        return Block(
            kv=kv,
            token_ids=token_ids,
            generated=_GENERATED,
            sampler=request.sampler,
            needs_logprob=request.params.logprobs,
            top_logprobs=request.params.top_logprobs,
            needs_taps=kv.reads_taps or (speculation.has_taps and speculation.needs_taps(request)),
        )

    def _tokens(self, request: Request, decoders: int) -> int:
        """Tokens that the request would contribute to a step in which `decoders` requests decode."""
        pending, segment = request.pending_tokens, self._config.segment_tokens
        if pending == 1:
            return 1
        most = self._most_tokens(request)
        if decoders and request.is_prefilling:
            beside = min(decoders, self._config.max_batch)
            most = min(self._most_tokens(request, beside), self._tokens_beside(request, beside))
        if request.has_recorded_forced:
            most = min(most, segment)  # the logits of all its tokens are wanted, and they are large
        if request.pauses_at > (position := request.session.kv.next_position):
            most = min(most, request.pauses_at - position)
        tokens = min(pending, self._room(request), most)
        is_sized = _is_timed(request) and most < self._config.step_tokens
        if tokens < pending and (is_sized or self._targets.inter_token_seconds):
            # A chunk that ends between page boundaries costs more: segments and blocks always begin at the same places.
            geometry = request.session.kv.context.geometry
            tokens = cut(request.session.kv.next_position, tokens, lcm(geometry.page_tokens, geometry.token_quantum))
        if tokens < pending and request.session.kv.states is not None:
            # Chunks that end with segments leave the states of a prefill in one piece.
            tokens = cut(request.session.kv.next_position, tokens, segment)
        return tokens

    def _most_tokens(self, request: Request, beside: int = 0) -> int:
        """Most tokens of the request in one step beside `beside` others: `step_tokens`, or as many as one recorded
        step takes. Off a GPU as many as take `CHUNK_SECONDS`, and a page at least.

        A session whose steps cannot be recorded, now or at all, gains nothing from shorter chunks, and neither does one
        with so many tokens that the device is busy while the host launches them.
        """
        kv, most = request.session.kv, self._config.step_tokens
        at_once, busy = kv.context.most_tokens_at_once, kv.context.busy_tokens
        if _is_timed(request):
            return min(most, max(self._chunk.tokens - beside, self._config.page_tokens))
        if busy is not None and not beside and min(request.pending_tokens, most) >= busy:
            return most
        if at_once is None or not kv.fits_numbers:
            return most
        if kv.next_position + at_once > kv.context.most_positions_in_pieces:
            return most
        return min(most, max(at_once - beside, self._config.page_tokens))

    def _prefill_tokens_beside(self, request: Request, decoders: int) -> int:
        """Most prefill tokens, of this request and others together, beside `decoders` decoding requests."""
        most = min(self._config.segment_tokens, self._most_tokens(request, decoders))
        if self._targets.inter_token_seconds:
            in_time = self._pace.tokens_within(self._targets.inter_token_seconds)
            most = most if in_time is None else min(most, in_time - decoders)
        return most

    def _tokens_beside(self, request: Request, decoders: int) -> int:
        """Most tokens of a prefill chunk beside decoding requests: short chunks keep their inter-token latency low."""
        config, targets = self._config, self._targets
        in_time = self._pace.tokens_within(targets.inter_token_seconds)
        return chunk_beside_decoders(
            targets,
            pending=request.pending_tokens,
            waited_seconds=self._clock() - request.accepted_at,
            least_tokens=config.page_tokens,
            segment_tokens=config.segment_tokens,
            most_queries=config.step_tokens,
            seconds_of_chunk=self._pace.seconds(config.segment_tokens + decoders),
            tokens_in_time=None if in_time is None else in_time - decoders,
        )

    @staticmethod
    def _room(request: Request) -> int:
        session = request.session
        kv = session.kv
        if not kv.is_selective:
            return kv.room(generated=False)
        pending = request.pending_tokens
        generated = session.pending_generated(pending)
        if True not in generated:
            return kv.room(generated=False)
        room, of_appended = kv.room(), kv.room(generated=False)
        if room < pending and of_appended > room:
            # Appended ones may have a longer step, which generated ones would shorten.
            if (first := int(np.argmax(generated))) >= room:
                return min(of_appended, first)
            if not generated[-1]:
                return min(room, int(np.flatnonzero(generated)[-1]) + 1)
        return room


def _is_timed(request: Request) -> bool:
    """Are its chunks sized by what steps take? A GPU has long steps at its best, or those it has recorded."""
    context = request.session.kv.context
    return context.most_tokens_at_once is None and context.device.type != "cuda"


def _is_decoding(request: Request) -> bool:
    """Has it one token without K/V, the last one that it sampled?"""
    session = request.session
    return request.last_ids is not None and session.kv.length + 1 == session.history.length


def _turn_of(request: Request) -> Turn:
    """The turn that the request waits for: its owner's, to prefill or to decode."""
    return request.session.owner, request.is_prefilling
