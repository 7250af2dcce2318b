"""The memory of sessions, sized by the settings: the pool of K/V on the device, the second tier, copies in files."""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig
from inference_engine.decode.draft import Drafter
from inference_engine.errors import ConfigError
from inference_engine.kernels.components import MOST_TILE, ModelComponents
from inference_engine.kv.context import MOST_PIECES, KVContext, TapCodec, TokenCodec
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.address_space import MOST_BYTES
from inference_engine.kv.memory.tier import open_tier
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy, bound_of, grows_with_history, whole_segments
from inference_engine.metrics import EngineMetrics
from inference_engine.session.copy_index import HibernationLimits
from inference_engine.session.hibernation import Hibernation
from inference_engine.session.journal import CopyBook
from inference_engine.session.session import Session
from inference_engine.session.snapshots import NoSnapshots, OpenSnapshots
from inference_engine.session.store import SessionStore

_log = logging.getLogger(__name__)

_SHARE = 4  # without a setting, one part in this many of the free memory is taken


def open_memory(
    forward: Forward,
    geometry: Geometry,
    config: EngineConfig,
    metrics: EngineMetrics,
    *,
    default_strategy: KVStrategy,
    latent: TokenCodec | None,
    f_theta: TapCodec | None,
    why_no_f_theta: str,
    components: ModelComponents | None,
    drafter: Drafter,
) -> KVContext:
    """Allocate the pool and the tier, and prepare the drafter. Raises ConfigError or BackendError if it is impossible.

    If sessions grow, the address space holds `max_sessions` of the longest ones: a grant bounds the memory of a
    session, but only its length limit bounds its addresses. With shared forks it also holds ended sessions whose
    entries forks still read, at most MOST_PIECES for each session.
    """
    free_bytes = forward.free_bytes()
    if config.kv_bytes > free_bytes:
        _log.warning(
            "kv_bytes is %d, and %d bytes of memory are free: the system may end the process when sessions take more",
            config.kv_bytes,
            free_bytes,
        )
    capacity = config.kv_bytes or free_bytes // _SHARE
    address_bytes = 0
    if grows(config, forward):
        longest = _longest_bytes(default_strategy, geometry)
        allocations = config.max_sessions * (1 + MOST_PIECES if config.share_forks else 1)
        address_bytes = min(MOST_BYTES, 2 * capacity + allocations * longest)
    tap_layers = taps_of(drafter, f_theta)
    opened = forward.open(geometry, capacity, address_bytes=address_bytes, tap_layers=tap_layers)
    tier = open_tier(
        forward.device,
        capacity_bytes=config.tier_bytes,
        share=_SHARE,
        count=metrics.count_transfer,
    )
    placed = {layer: found.to(forward.device) for layer, found in (components or {}).items()}
    if latent is not None:
        latent = latent.using(opened.ops.trellis)
    if f_theta is not None and f_theta.tap_layers != tap_layers:
        why_no_f_theta = (
            f"f_theta reads the hidden states of layers {f_theta.tap_layers}, the server's drafter those of layers "
            f"{tap_layers}; make one for this drafter with `kakeya train f-theta`"
        )
        f_theta = None
    context = replace(
        opened,
        latent=latent,
        f_theta=None if f_theta is None else f_theta.using(opened.ops.trellis),
        why_no_f_theta=why_no_f_theta,
        components=placed,
        tier=tier,
        draft_memories=drafter,
    )
    drafter.prepare(context)
    return context


def taps_of(drafter: Drafter, f_theta: TapCodec | None) -> tuple[int, ...]:
    """The layers after which steps return hidden states: those of the drafter, or, if it reads none, of f_theta."""
    return drafter.tap_layers or (() if f_theta is None else f_theta.tap_layers)


def _longest_bytes(default_strategy: KVStrategy, geometry: Geometry) -> int:
    """Most bytes of K/V of a session that grows, with any strategy.

    No strategy keeps more of a history than every entry, and either the bounds of its blocks, which are whole pages, or
    an index of its keys, at most a byte a channel. Memory that does not depend on the length of the history is granted
    from the start, so `kv_bytes` bounds it.
    """
    entries = Full().bound(geometry, geometry.trained_positions).peak_bytes
    bounds = -(-entries // geometry.page_tokens)
    channels = sum(layer.kv_heads * layer.head_dim for layer in geometry.layers)
    index = channels * (geometry.trained_positions + 2 * MOST_TILE)
    default = default_strategy.bound(geometry, default_strategy.length_limit(geometry)).peak_bytes
    return max(default, entries + max(bounds, index))


def grows(config: EngineConfig, forward: Forward) -> bool:
    """Is memory granted as histories grow, unless a session asks otherwise? Raises ConfigError if impossible."""
    if config.growth == "best_effort" and not forward.has_address_space:
        raise ConfigError(
            f"growth=best_effort needs address space beyond memory, which {forward.device} does not give; leave it at "
            "auto and set default_limit_tokens, so that sessions that ask for no limit reserve less"
        )
    return config.growth != "guaranteed" and forward.has_address_space


def check_one_session_fits(
    strategy: KVStrategy, context: KVContext, limit_tokens: int | None, *, is_growing: bool
) -> None:
    """Raise ConfigError if not even one session of the default strategy fits: its start if it grows, else all of it.

    One that grows, and will find no memory before its limit, is warned of in the log.
    """
    is_growing = is_growing and grows_with_history(strategy, context, limit_tokens)
    tokens = min(context.geometry.segment_tokens, limit_tokens or 0) if is_growing else limit_tokens
    needed, capacity = bound_of(strategy, context, tokens).peak_bytes, context.pool.capacity_bytes
    if needed <= capacity:
        if is_growing and limit_tokens and (whole := bound_of(strategy, context, limit_tokens).peak_bytes) > capacity:
            _log.warning(
                "a session of the default strategy %s may have %d tokens, which take %d bytes of K/V; there are %d in "
                "all, for about %d tokens of one session. Longer ones end with NO_CAPACITY: give the server more "
                "kv_bytes, or set default_limit_tokens",
                strategy,
                limit_tokens,
                whole,
                capacity,
                _most_tokens(strategy, context, limit_tokens),
            )
        return
    what = f"a session's first {tokens} tokens of K/V" if is_growing else "the K/V of a session"
    remedy = (
        "give the server more kv_bytes"
        if is_growing
        else ("give the server more kv_bytes, set a smaller default_limit_tokens, or another strategy")
    )
    raise ConfigError(
        f"{what} with the default strategy {strategy} would take {needed} bytes, there are {capacity} in all; {remedy}"
    )


def _most_tokens(strategy: KVStrategy, context: KVContext, limit_tokens: int) -> int:
    """The longest history, of at most `limit_tokens`, whose segments the pool holds."""

    def granted_bytes(tokens: int) -> int:
        return bound_of(strategy, context, whole_segments(tokens, context.geometry, limit_tokens)).peak_bytes

    return bisect_right(range(1, limit_tokens + 1), context.pool.capacity_bytes, key=granted_bytes)


def open_snapshots(
    book: CopyBook | None,
    store: SessionStore,
    context: KVContext,
    forward: Forward,
    config: EngineConfig,
    metrics: EngineMetrics,
    clock: Callable[[], float],
) -> OpenSnapshots:
    """What makes the snapshots of an engine: none, if its settings or its journal keep no copies of K/V."""
    if book is None or config.hibernate == "never":
        return NoSnapshots
    facts, geometry = forward.facts, context.geometry
    made_by = {
        "weights": book.weights,
        "model": [facts.dtype, facts.backend, facts.numerics, forward.device.type],
        "kv": [str(context.pool.memory.dtype)],
        "layers": hashlib.sha256(repr(geometry.layers).encode()).hexdigest(),
        **({"states": hashlib.sha256(repr(geometry.states).encode()).hexdigest()} if geometry.states else {}),
        "mode": "batched" if geometry.key_quantum == 1 else "fixed-shape",
        "page_tokens": geometry.page_tokens,
        "segment_tokens": geometry.segment_tokens,
        **({"segments_at_once": geometry.segments_at_once} if geometry.segments_at_once > 1 else {}),
    }

    def fingerprint(session: Session) -> str:
        strategy = session.kv.strategy
        of_session = {"strategy": str(strategy), "codec": store.codec_of(strategy)}
        return json.dumps({**made_by, **of_session}, sort_keys=True)

    limits = HibernationLimits(
        after_seconds=config.hibernate_after_seconds,
        is_measured=config.hibernate == "auto",
        state_bytes=config.state_bytes,
        state_bytes_per_owner=config.state_bytes_per_owner,
    )
    return lambda wake: Hibernation(store, book, metrics, clock, limits=limits, fingerprint=fingerprint, wake=wake)
