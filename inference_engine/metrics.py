"""All Prometheus metrics, as attributes of one object with its own registry.

Labels take values from a small fixed set (the tuples below, names of strategies and methods, status codes and reasons):
never ids, owners, client labels or keys, hashed or not. Instruments without labels cost about a
microsecond and may be used for every token; look up a labelled child once.

Events are counters and histograms, updated as they happen. What exists at a moment (`EngineStatistics`) is counted at
every scrape, so it is never stale.

Names begin with `kakeya_`. Until the next release each metric is shown without that prefix, too (`_Former`).
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from inference_engine.logs import LOST_REASONS, lost_lines

PREFIX = "kakeya"
SESSION_OUTCOMES = ("closed", "evicted", "failed")
TRANSFERS = ("kept", "streamed", "fetched")
PREFIX_RELEASES = ("room", "budget", "idle", "replaced")
EVICTION_REASONS = ("ttl", "lru", "close", "handed_over")  # `close`: by their client; the others by the server
GENERATE_OUTCOMES = (
    "max_tokens",
    "eos",
    "constraint",
    "truncated",
    "cancelled",
    "deadline",
    "closed",
    "draining",
    "failed",
)
# Why a Generate was refused: it would wait too long, the queue or its owner's part of it is full, the server drains.
REFUSALS = ("first_token", "queue", "owner_queue", "draining")
# `refused`: there was no place for one more session; `corrupt`: its records are damaged; `mismatch`: other settings.
RESTORES = ("restored", "refused", "corrupt", "mismatch", "elsewhere")
# `given_up`: the session was used meanwhile; `slower`: prefilling is faster; `no_room`: for so many bytes.
COPY_SAVES = ("saved", "given_up", "slower", "no_room", "failed")
# `foreign`: of other tokens, or made under other settings. Where one is not used, its session's history is prefilled.
COPY_READS = ("used", "shared", "no_room", "missing", "damaged", "foreign", "slower", "failed")
INVARIANTS = ("inv1", "inv2", "inv3")
# `dropped`: idle, and no more than its token ids.
PORTS = ("grpc", "http", "metrics")
SESSION_STATES = ("idle", "dropped", "appending", "queued", "prefilling", "decoding", "failed")
# Kinds of a session's bytes, as in `SessionKV.footprint`.
KV_KINDS = ("entries", "sink_copy", "bounds", "components", "fetched", "archive", "restored", "states", "draft")
# Parts of a step's time, in order. `plan`, `draft` and `settle` are not the model's.
STEP_PARTS = ("plan", "draft", "forward", "sample", "settle")

# Powers of two, because tokens come in pages and segments.
_TOKENS = tuple(float(2**power) for power in range(0, 21, 2))
_STEP_TOKENS = tuple(float(2**power) for power in range(13))
_STEP_SECONDS = tuple(
    milliseconds / 1000
    for milliseconds in (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 250, 500, 1000, 2500, 10_000)
)
_WAIT_SECONDS = (
    *(milliseconds / 1000 for milliseconds in (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750)),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 300.0),
)
_PART_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, *_STEP_SECONDS)
_RATES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_SESSIONS = tuple(float(2**power) for power in range(11))
_COUNTED_TOGETHER = 64  # observations
_DRAFTED = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatistics:
    """What an engine holds at one moment."""

    sessions: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by strategy and state
    kv_bytes: Mapping[str, int] = field(default_factory=dict)  # on the device, by kind
    kv_reserved_bytes: int = 0
    kv_capacity_bytes: int = 0
    kv_spare_bytes: int = 0
    kv_kept_for_forks_bytes: int = 0
    tier_bytes: int = 0
    tier_reserved_bytes: int = 0
    history_tokens: int = 0
    history_bytes: int = 0
    remembered_replies: int = 0
    waiting: int = 0  # Generates
    running: int = 0
    beat_age_seconds: float = 0.0


class EngineMetrics:
    """The instruments of one engine and of the server around it. Thread-safe.

    Two engines in one process have two of these: nothing is registered globally.
    """

    def __init__(self) -> None:
        # `session_created` beside `session_total` would read as a count.
        cast("Callable[[], None]", prometheus_client.disable_created_metrics)()
        self.registry = CollectorRegistry()
        self._statistics: Callable[[], EngineStatistics] | None = None
        self._states: dict[tuple[str, str], Gauge] = {}
        self._picked: tuple[Gauge, ...] = ()
        self._counting = threading.Lock()
        # A registry asks its collectors in the order in which they came: what is there is counted before it is shown.
        self.registry.register(_Look(self.look))
        ProcessCollector(registry=self.registry)
        self._add_sessions()
        self._add_memory()
        self._add_generates()
        self._add_steps()
        self._add_journal()
        self._add_server()
        ours = [each for each in vars(self).values() if isinstance(each, MetricWrapperBase)]
        self.registry.register(_Former(ours))

    def _add_journal(self) -> None:
        self.sessions_kept = self._gauge(
            "journal_sessions", "Sessions kept in the state folder, those in memory included."
        )
        self.journal_bytes = self._gauge("journal_bytes", "Bytes of the journal's database, without its log.")
        self.sessions_forgotten = self._counter(
            "journal_forgotten_total", "Sessions deleted from the state folder because they were unused for too long."
        )
        self.journal_commit_seconds = self._histogram(
            "journal_commit_seconds",
            "Seconds of a commit of the journal. Tokens and answers wait for it; the model does not.",
            _PART_SECONDS,
        )
        self.journal_changes = self._counter("journal_change_total", "Changes of sessions committed to the journal.")
        self.journal_away = self._gauge(
            "journal_away", "1 while the journal cannot be reached: Generates pause, and new work is refused."
        )
        self.journal_lost = self._counter(
            "journal_lost_total", "Times that other servers took over this one's sessions, since it seemed to be gone."
        )
        self.journal_full = self._gauge(
            "journal_full", "1 while the disk of the journal is full: Generates pause, and new work is refused."
        )
        self.restores = self._counter(
            "journal_restore_total", "Sessions read from the journal into memory, by what came of it.", outcome=RESTORES
        )
        self.restore_seconds = self._histogram(
            "journal_restore_seconds", "Seconds to read a session from the journal.", _WAIT_SECONDS
        )
        self.copies = self._gauge("kv_copies", "Files with copies of sessions' K/V in the state folder.")
        self.copies_bytes = self._gauge("kv_copies_bytes", "Bytes of these files.")
        self.copies_saved = self._counter(
            "kv_copy_save_total", "Copies of idle sessions' K/V begun, by what came of them.", outcome=COPY_SAVES
        )
        self.copies_read = self._counter(
            "kv_copy_read_total",
            "Copies of K/V found for a session whose K/V was not in memory, by what came of them.",
            outcome=COPY_READS,
        )
        self.copy_save_seconds = self._histogram(
            "kv_copy_save_seconds", "Seconds from the first piece of a copy until it is safe.", _WAIT_SECONDS
        )
        self.copy_read_seconds = self._histogram(
            "kv_copy_read_seconds",
            "Seconds that a Generate waited for a copy to be read and put in place.",
            _WAIT_SECONDS,
        )
        self.histories_behind = self._counter(
            "session_history_behind_client_total",
            "Calls of clients with tokens that the history has not: the server lost them, or a client is mistaken.",
        )

    def _add_sessions(self) -> None:
        self.sessions_active = self._gauge("session_active", "Sessions open now.")
        self.session_states = Gauge(
            "session_state",
            "Sessions open now, by strategy and state.",
            ("strategy", "state"),
            namespace=PREFIX,
            registry=self.registry,
        )
        self.sessions_total = self._counter(
            "session_total", "Sessions that ended, by outcome.", outcome=SESSION_OUTCOMES
        )
        self.evicted = self._counter(
            "session_evicted_total",
            "Sessions that released their memory, by cause: idle for too long, to make room, closed by the client, "
            "asked for by another server.",
            reason=EVICTION_REASONS,
        )
        self.shared_prefix_tokens = self._counter(
            "shared_prefix_tokens_total",
            "Tokens whose K/V a session took from another one of its owner, not prefilled.",
        )
        self.kept_prefix_tokens = self._counter(
            "kept_prefix_tokens_total", "Those of them that it took from a session that had closed."
        )
        self.prefixes_kept = self._gauge("kept_prefixes", "Closed sessions whose K/V is kept for new ones.")
        self.prefix_bytes = self._gauge(
            "kept_prefix_bytes", "Bytes of their K/V, which no session needs now; they do not count as reserved."
        )
        self.prefix_capacity_bytes = self._gauge("kept_prefix_capacity_bytes", "Bytes of it that may be kept.")
        self.prefixes_released = self._counter(
            "kept_prefix_released_total",
            "Closed sessions whose K/V is kept no longer, by cause: a session needed the memory, others that closed "
            "since have it, it was not used for too long, a longer one has all of it.",
            reason=PREFIX_RELEASES,
        )
        self.dropped = self._counter(
            "session_dropped_total", "Times a session's K/V was dropped to make room; its token ids are kept."
        )
        self.history_tokens = self._histogram(
            "session_history_tokens", "Tokens in a session's history when a Generate ends.", _TOKENS
        )
        self.held_history_tokens = self._gauge(
            "session_history_held_tokens",
            "Tokens in the histories of open sessions, shared ones of forks counted once, those that streams of closed "
            "sessions have still to send, and those of appends under way.",
        )
        self.held_history_bytes = self._gauge(
            "session_history_held_bytes",
            "Host memory of histories in bytes: token ids, marks, which ids occur, the journal.",
        )
        self.remembered_replies = self._gauge(
            "session_remembered_replies",
            "Replies stored by request id, some 600 bytes each: the last 64 of each kind of call of a session, and the"
            " last 4,096 of one owner's ended sessions.",
        )
        self.invariant_violations = self._counter(
            "cache_invariant_violations_total",
            "Sessions failed because cache and history disagreed, each counted in both spellings of its kind. The one "
            "in capitals goes with the next release.",
            kind=(*INVARIANTS, *map(str.upper, INVARIANTS)),
        )

    def _add_memory(self) -> None:
        self.kv_live_bytes = self._gauge("session_kv_live_bytes", "Bytes of K/V held, summed over sessions.")
        self.kv_bytes = Gauge(
            "session_kv_bytes",
            "Bytes of K/V held on the device, by kind.",
            ("kind",),
            namespace=PREFIX,
            registry=self.registry,
        )
        for kind in KV_KINDS:
            self.kv_bytes.labels(kind)
        self.kv_reserved_bytes = self._gauge("session_kv_reserved_bytes", "Bytes of K/V reserved for open sessions.")
        self.kv_spare_bytes = self._gauge(
            "session_kv_spare_bytes",
            "Bytes of restored entries beyond the bounds of sessions, which nothing needs now; they do not count as "
            "reserved.",
        )
        self.kv_kept_for_forks_bytes = self._gauge(
            "session_kv_kept_for_forks_bytes",
            "Reserved bytes of K/V of ended sessions, kept for forks that read them.",
        )
        self.kv_capacity_bytes = self._gauge("session_kv_capacity_bytes", "Bytes of K/V that may be reserved.")
        self.kv_reserved_ratio = self._gauge(
            "session_kv_reserved_ratio",
            "Reserved bytes of K/V as a share of those that may be, 0 to 1. Idle sessions count, though new ones of "
            "their owner may take their memory.",
        )
        self.tier_live_bytes = self._gauge(
            "session_tier_live_bytes", "Bytes of K/V held off the device, summed over sessions."
        )
        self.tier_reserved_bytes = self._gauge(
            "session_tier_reserved_bytes", "Bytes off the device reserved for open sessions."
        )
        self.tier_capacity_bytes = self._gauge(
            "session_tier_capacity_bytes", "Bytes off the device that may be reserved."
        )
        self.tier_transfers = self._counter(
            "session_tier_transfer_bytes_total",
            "Bytes of K/V that left the device, were streamed back whole, or were fetched as selected blocks.",
            transfer=TRANSFERS,
        )
        self._tier_transfers = {kind: self.tier_transfers.labels(kind) for kind in TRANSFERS}

    def _add_generates(self) -> None:
        self.generates_active = self._gauge("generate_active", "Generates running now.")
        self.queue_depth = self._gauge("generate_queue_depth", "Generates waiting for their first step.")
        self.queue_seconds = self._histogram(
            "generate_queue_seconds",
            "Seconds from accepting a Generate to its start, waiting for memory to wake included.",
            _WAIT_SECONDS,
        )
        self.predicted_wait_seconds = self._histogram(
            "generate_predicted_wait_seconds",
            "Predicted seconds that a Generate's first token waits for other Generates, when it arrives; refused ones"
            " included.",
            _WAIT_SECONDS,
        )
        self.refused = self._counter(
            "generate_refused_total", "Generates that were refused, by reason.", reason=REFUSALS
        )
        self.wake_seconds = self._histogram(
            "generate_wake_seconds",
            "Seconds to restore a session's old KV entries for a Generate; on a GPU, to launch it.",
            _WAIT_SECONDS,
        )
        self.generates = self._counter("generate_total", "Generates that ended, by outcome.", outcome=GENERATE_OUTCOMES)
        self.generated_tokens = self._counter("generate_tokens_total", "Tokens generated and committed.")
        self.prefilled_tokens = self._counter("generate_prefilled_tokens_total", "Tokens of history forwarded.")
        self.cached_tokens = self._counter(
            "generate_cached_tokens_total", "Tokens of history whose K/V was there when a Generate began."
        )
        self.prefill_tokens = self._histogram("generate_prefill_tokens", "Tokens one Generate had to prefill.", _TOKENS)
        self.prefill_seconds = self._histogram(
            "generate_prefill_duration_seconds",
            "Seconds from a Generate's first step to the end of its prefill.",
            _WAIT_SECONDS,
        )
        self.prefill_rate = self._histogram(
            "generate_prefill_tokens_per_second",
            "Tokens that a Generate prefilled per second; batched prefills share the time.",
            _RATES,
        )
        self.first_token_seconds = self._histogram(
            "generate_first_token_seconds",
            "Seconds from accepting a Generate to its first token, queue included.",
            _WAIT_SECONDS,
        )
        self.step_gap_seconds = self._histogram(
            "generate_step_gap_seconds",
            "Seconds between two steps that gave one Generate tokens: how long its stream is silent.",
            _STEP_SECONDS,
        )
        self.inter_token_seconds = self._histogram(
            "generate_inter_token_seconds",
            "Seconds for each token of a Generate but its first: those since the step before it, shared by the tokens "
            "of one step.",
            _STEP_SECONDS,
        )
        self._gaps: list[tuple[float, int]] = []
        # Seconds since the step before it gave this Generate tokens, and how many this one gives.
        self.note_gap: Callable[[tuple[float, int]], None] = self._gaps.append
        self.drafted_tokens = self._counter("generate_drafted_tokens_total", "Draft tokens that were verified.")
        self.accepted_tokens = self._counter("generate_accepted_tokens_total", "Draft tokens that were accepted.")
        self.acceptance_length = self._histogram(
            "generate_acceptance_length",
            "Tokens from a step with a draft: the accepted draft tokens, and one.",
            _DRAFTED,
        )
        self.drafter_failures = self._counter(
            "generate_drafter_failures_total", "Generates that continued without the drafter after it raised an error."
        )
        self.non_finite_logits = self._counter(
            "generate_non_finite_logits_total", "Generates that failed because the logits held NaN or infinity."
        )

    def _add_steps(self) -> None:
        self.step_seconds = self._histogram(
            "engine_step_seconds", "Seconds of one step, from scheduling to the last commit.", _STEP_SECONDS
        )
        self.step_parts = Distribution(
            "engine_step_part_seconds",
            "Seconds of one step by part: planning on the host, drafting, the forward until the host is free again,"
            " sampling until the ids arrive, settling. They add up to engine_step_seconds.",
            ("part",),
            buckets=_PART_SECONDS,
            namespace=PREFIX,
            registry=self.registry,
        )
        self.seconds_of_part = {part: self.step_parts.labels(part) for part in STEP_PARTS}
        self.step_tokens = self._histogram(
            "engine_step_tokens", "Tokens in one forward, over all its sessions.", _STEP_TOKENS
        )
        self.step_sessions = self._histogram("engine_step_sessions", "Sessions in one forward.", _SESSIONS)
        self._noted = (
            self.step_seconds,
            self.step_tokens,
            self.step_sessions,
            *self.seconds_of_part.values(),
        )
        self.beat_age = self._gauge(
            "engine_beat_age_seconds", "Seconds since the engine's last iteration, if it has work; else 0."
        )
        self.stalls = self._counter("engine_stalls_total", "Times the engine was found stalled.")

    def _add_server(self) -> None:
        self.rpc_total = Counter(
            "rpc_total",
            "Calls that ended, by method and gRPC code.",
            ("method", "code"),
            namespace=PREFIX,
            registry=self.registry,
        )
        self.rpc_seconds = Histogram(
            "rpc_duration_seconds",
            "Seconds in a call, streams from first to last frame.",
            ("method",),
            buckets=_WAIT_SECONDS,
            namespace=PREFIX,
            registry=self.registry,
        )
        self.rpc_errors = Counter(
            "rpc_error_total",
            "Calls that ended with a runtime error, by its reason: refused, abandoned or failed.",
            ("reason",),
            namespace=PREFIX,
            registry=self.registry,
        )
        self.http_responses = Counter(
            "http_response_total",
            "Answers over HTTP, by route and status.",
            ("route", "status"),
            namespace=PREFIX,
            registry=self.registry,
        )
        self.connections_dropped = self._counter(
            "server_connection_dropped_total",
            "Connections dropped because there were too many without an accepted call.",
            port=PORTS,
        )
        self.addresses_barred = self._counter(
            "server_address_barred_total",
            "How often an address was barred: its connections were dropped too often, and it has shown no key.",
        )
        self.replays = self._counter(
            "rpc_replayed_total", "Calls repeated with their request id: answered as before, or attached."
        )
        self.lost_log_lines = self._counter(
            "log_lost_lines_total",
            "Log lines lost: they came faster than they are read, or writing them failed.",
            reason=LOST_REASONS,
        )
        self._counted_lost = dict(lost_lines())  # lines lost before this engine are not counted
        self.draining = self._gauge("server_draining", "1 while the server shuts down, else 0.")
        self.build_info = Gauge(
            "server_build_info",
            "Always 1; the labels describe the server.",
            ("version", "model", "device", "dtype", "mode"),
            namespace=PREFIX,
            registry=self.registry,
        )

    def set_build_info(self, *, version: str, model: str, device: str, dtype: str, mode: str) -> None:
        self.build_info.clear()
        self.build_info.labels(version=version, model=model, device=device, dtype=dtype, mode=mode).set(1)

    def name_for_pickers(self, waiting: str, running: str, kv: str) -> None:
        """Show the queue, what runs and the share of K/V under these names, too. ValueError: one is ours already."""
        seen = ((waiting, self.queue_depth), (running, self.generates_active), (kv, self.kv_reserved_ratio))
        self._picked = tuple(
            Gauge(name, f"As {_name(ours)}, for a picker of endpoints.", registry=self.registry) for name, ours in seen
        )

    def count_violation(self, kind: str) -> None:
        """kind: that of `InvariantViolated`, in capitals."""
        for spelled in (kind.lower(), kind):
            self.invariant_violations.labels(kind=spelled).inc()

    def count_steps(self) -> None:
        """Count what was noted of steps and their tokens; call it now and then."""
        if len(self._gaps) >= _COUNTED_TOGETHER:
            self._count_gaps()
        for distribution in self._noted:
            distribution.count()

    def _count_gaps(self) -> None:
        with self._counting:  # another thread may count at the same time
            noted = self._gaps[:]
            del self._gaps[: len(noted)]
        self.step_gap_seconds.count([seconds for seconds, _ in noted])
        self.inter_token_seconds.count([each for seconds, tokens in noted for each in [seconds / tokens] * tokens])

    def count_transfer(self, kind: str, count: int) -> None:
        """`count` bytes moved between the device and the second tier; kind: one of TRANSFERS."""
        self._tier_transfers[kind].inc(count)

    # -- the current state ------------------------------------------------------------------------------------------

    def watch(self, statistics: Callable[[], EngineStatistics], strategies: Iterable[str]) -> None:
        """`statistics` is called, from any thread, at every scrape; its strategies are among `strategies`."""
        self._statistics = statistics
        self._states = {
            pair: self.session_states.labels(*pair) for pair in itertools.product(strategies, SESSION_STATES)
        }

    def look(self) -> None:
        """Update the gauges, the count of lost log lines and the histograms of gaps."""
        self._count_gaps()
        with self._counting:  # scrapes run in threads of their own
            lost = lost_lines()
            for reason, count in lost.items():
                self.lost_log_lines.labels(reason).inc(count - self._counted_lost[reason])
            self._counted_lost = dict(lost)
        if self._statistics is None:
            return
        now = self._statistics()
        for pair, gauge in self._states.items():
            gauge.set(now.sessions.get(pair, 0))
        self.sessions_active.set(sum(now.sessions.values()))
        for kind in {*KV_KINDS, *now.kv_bytes}:
            self.kv_bytes.labels(kind).set(now.kv_bytes.get(kind, 0))
        self.kv_live_bytes.set(sum(now.kv_bytes.values()))
        self.kv_reserved_bytes.set(now.kv_reserved_bytes)
        self.kv_spare_bytes.set(now.kv_spare_bytes)
        self.kv_kept_for_forks_bytes.set(now.kv_kept_for_forks_bytes)
        self.tier_live_bytes.set(now.tier_bytes)
        self.tier_reserved_bytes.set(now.tier_reserved_bytes)
        self.held_history_tokens.set(now.history_tokens)
        self.held_history_bytes.set(now.history_bytes)
        self.remembered_replies.set(now.remembered_replies)
        self.queue_depth.set(now.waiting)
        self.generates_active.set(now.running)
        self.beat_age.set(now.beat_age_seconds)
        ratio = now.kv_reserved_bytes / now.kv_capacity_bytes if now.kv_capacity_bytes else 0.0
        self.kv_reserved_ratio.set(ratio)
        for gauge, value in zip(self._picked, (now.waiting, now.running, ratio), strict=False):  # none, or three
            gauge.set(value)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, namespace=PREFIX, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Distribution:
        return Distribution(name, help_text, buckets=buckets, namespace=PREFIX, registry=self.registry)

    def _counter(self, name: str, help_text: str, **labels: tuple[str, ...]) -> Counter:
        """A counter with at most one label, every known value of which starts as 0."""
        counter = Counter(name, help_text, tuple(labels), namespace=PREFIX, registry=self.registry)
        for values in labels.values():
            for value in values:
                counter.labels(value)
        return counter


class Distribution(Histogram):
    """A histogram that counts observations many at a time, and before it is read.

    A step makes a dozen. One by one, between two forwards, each would take longer than some of what they measure.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._waiting: deque[float] = deque()
        # As `observe`, in C. The caller has to `count` from time to time.
        self.note: Callable[[float], None] = self._waiting.append
        super().__init__(*arguments, **options)

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._waiting.append(amount)
        if len(self._waiting) >= _COUNTED_TOGETHER:
            self.count()

    def count(self, more: Iterable[float] = ()) -> None:
        """more: observed, too."""
        amounts = list(more)
        with suppress(IndexError):  # another thread may count at the same time
            while self._waiting:
                amounts.append(self._waiting.popleft())
        self._sum.inc(sum(amounts))
        for place, count in Counts([bisect_left(self._upper_bounds, amount) for amount in amounts]).items():
            self._buckets[place].inc(count)

    def _child_samples(self) -> Iterable[Sample]:
        self.count()
        return super()._child_samples()


class _Look(Collector):
    """Has no metrics of its own; updates the others before a scrape."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self._look()
        return ()


class _Former(Collector):
    """The same metrics as they were called before they had a prefix."""

    def __init__(self, metrics: Iterable[MetricWrapperBase]) -> None:
        self._metrics = tuple(metrics)

    def describe(self) -> Iterable[Metric]:
        return [_renamed(family) for metric in self._metrics for family in metric.describe()]

    def collect(self) -> Iterable[Metric]:
        return [_renamed(family) for metric in self._metrics for family in metric.collect()]


def _renamed(family: Metric) -> Metric:
    now = family.name + ("_total" if family.type == "counter" else "")
    former = Metric(
        family.name.removeprefix(f"{PREFIX}_"), f"Use {now}: this name goes with the next release.", family.type
    )
    former.samples = [sample._replace(name=sample.name.removeprefix(f"{PREFIX}_")) for sample in family.samples]
    return former


def _name(metric: MetricWrapperBase) -> str:
    return next(iter(metric.describe())).name
