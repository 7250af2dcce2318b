"""What idle sessions hold: many of one strategy and length, filled and left alone, in an engine of their own.

    reported    bytes that the engine reports for a session between Generates, on the device; in the tier: off it
    reserved    what the pool has taken for it
    allocated   by how much the process grew on a CPU (resident set), or the device's allocator on a GPU, from before
                the pool was made until all sessions were idle, ÷ sessions: the pool, with room to wake one, is in it

The engine's pool holds just these sessions and what one of them needs besides while it is active. On a CPU memory that
was once written stays with the process, so the room to wake in is counted there, too.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Bound
from laboratory.evaluation.arguments import geometry_of
from laboratory.evaluation.models import Target
from laboratory.evaluation.sessions import append_all, circular, opened
from laboratory.evaluation.timing import Allocator, start

_FOR_EVER_SECONDS = 1e8  # no session is evicted for being idle
_STRIDE = 997  # ids between the beginnings of two histories


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Bytes of one session. peak_bytes: the most that was reported while one that had been idle generated.

    transient_bytes: what the device's allocator had beyond its buffers meanwhile (None: this device has no such count).
    """

    sessions: int
    reported_bytes: int
    tier_bytes: int
    reserved_bytes: int
    allocated_bytes: float
    peak_bytes: int
    transient_bytes: int | None
    bound: Bound


def fill(
    target: Target, strategy: KVStrategy, length: int, *, sessions: int, appended: int, token_ids: Sequence[int]
) -> Idle:
    """Let `sessions` of `length` tokens become idle and wake one of them with `appended` more.

    Raises InvalidArgument, NoCapacity or BackendError for what cannot be had.
    """
    limit = length + 1 + appended + 1
    bound = strategy.resolved(geometry_of(target)).bound(geometry_of(target), limit)
    _warm_up(target.engine, strategy, length, appended, token_ids)
    before = _allocated(target.engine)
    with Engine(
        target.forward,
        _config(target.engine.config, bound, sessions),
        latent=target.latent,
        components=target.components,
    ) as engine:
        names = []
        for number in range(sessions):
            names.append(engine.create_session(strategy=strategy, limit_tokens=limit, guaranteed=True).session_id)
            _go_on(engine, names[-1], circular(token_ids, number * _STRIDE, length))
        allocated = _allocated(engine) - before
        reported = [engine.session_info(name) for name in names]
        reserved = engine.info().kv_reserved_bytes
        allocator = Allocator(engine)
        peak = _go_on(engine, names[0], token_ids[:appended])
        return Idle(
            sessions=sessions,
            reported_bytes=max(info.kv_live_bytes for info in reported),
            tier_bytes=max(info.tier_live_bytes for info in reported),
            reserved_bytes=reserved // sessions,
            allocated_bytes=allocated / sessions,
            peak_bytes=peak,
            transient_bytes=allocator.grown_bytes(),
            bound=bound,
        )


def _config(config: EngineConfig, bound: Bound, sessions: int) -> EngineConfig:
    return replace(
        config,
        kv_bytes=sessions * bound.sustained_bytes + bound.peak_bytes - bound.sustained_bytes,
        max_sessions=sessions,
        session_idle_ttl_seconds=_FOR_EVER_SECONDS,
        session_evictable_seconds=_FOR_EVER_SECONDS,
    )


def _warm_up(engine: Engine, strategy: KVStrategy, length: int, appended: int, token_ids: Sequence[int]) -> None:
    """What a first session makes the process keep for good is not the sessions'."""
    with opened(engine, strategy, length + 1 + appended + 1) as session:
        _go_on(engine, session, circular(token_ids, 0, length))
        _go_on(engine, session, token_ids[:appended])


def _go_on(engine: Engine, session: str, token_ids: Sequence[int]) -> int:
    """Append and generate a token; the most bytes that were reported meanwhile."""
    append_all(engine, session, token_ids)
    (watch,) = start(engine, [session], tokens=1)
    watch.wait()
    return watch.kv_peak_bytes


def _allocated(engine: Engine) -> int:
    gc.collect()
    device = engine.info().facts.device
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
