"""Every number the runtime shows to Prometheus, as attributes of one object with its own registry.

Labels take values from a small fixed set (the tuples below, method names, status codes): never an id, a label or a key.
Instruments without labels cost about a microsecond and may be used for every token; look up a labelled child once.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SESSION_OUTCOMES = ("closed", "evicted", "failed")
TRANSFERS = ("kept", "streamed", "fetched")
EVICTION_REASONS = ("ttl", "lru")
GENERATE_OUTCOMES = ("max_tokens", "eos", "truncated", "cancelled", "deadline", "closed", "draining", "failed")
INVARIANTS = ("INV1", "INV2", "INV3")

# Powers of two, because rows and tokens come in pages and segments.
_TOKENS = tuple(float(2**power) for power in range(0, 21, 2))
_ROWS = tuple(float(2**power) for power in range(13))
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class EngineMetrics:
    """The instruments of one engine and of the server around it. Thread-safe.

    Two engines in one process have two of these: nothing is registered globally.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._add_sessions()
        self._add_memory()
        self._add_generates()
        self._add_steps()
        self._add_server()

    def _add_sessions(self) -> None:
        self.sessions_active = self._gauge("session_active", "Sessions open now.")
        self.sessions_total = self._counter("session_total", "Sessions that ended, by how.", outcome=SESSION_OUTCOMES)
        self.evicted = self._counter(
            "session_evicted_total", "Sessions the server closed on its own, by cause.", reason=EVICTION_REASONS
        )
        self.history_tokens = self._histogram(
            "session_history_tokens", "Tokens in a session's history when a Generate ends.", _TOKENS
        )
        self.invariant_violations = self._counter(
            "cache_invariant_violations_total", "Sessions failed because cache and history disagreed.", kind=INVARIANTS
        )

    def _add_memory(self) -> None:
        self.kv_live_bytes = self._gauge("session_kv_live_bytes", "Bytes of K/V held, summed over sessions.")
        self.kv_reserved_bytes = self._gauge("session_kv_reserved_bytes", "Bytes of K/V promised to open sessions.")
        self.kv_capacity_bytes = self._gauge("session_kv_capacity_bytes", "Bytes of K/V that may be promised.")
        self.tier_live_bytes = self._gauge(
            "session_tier_live_bytes", "Bytes of K/V held off the device, summed over sessions."
        )
        self.tier_reserved_bytes = self._gauge(
            "session_tier_reserved_bytes", "Bytes off the device promised to open sessions."
        )
        self.tier_capacity_bytes = self._gauge(
            "session_tier_capacity_bytes", "Bytes off the device that may be promised."
        )
        self.tier_transfers = self._counter(
            "session_tier_transfer_bytes_total",
            "Bytes of K/V that left the device, came by to be read whole, or were fetched as selected blocks.",
            transfer=TRANSFERS,
        )
        self._tier_transfers = {kind: self.tier_transfers.labels(kind) for kind in TRANSFERS}

    def _add_generates(self) -> None:
        self.generates_active = self._gauge("generate_active", "Generates running now.")
        self.queue_depth = self._gauge("generate_queue_depth", "Generates waiting for their first step.")
        self.generates = self._counter("generate_total", "Generates that ended, by how.", outcome=GENERATE_OUTCOMES)
        self.generated_tokens = self._counter("generate_tokens_total", "Tokens generated and committed.")
        self.prefilled_tokens = self._counter("generate_prefilled_tokens_total", "Tokens of history forwarded.")
        self.prefill_tokens = self._histogram("generate_prefill_tokens", "Tokens one Generate had to prefill.", _TOKENS)
        self.prefill_seconds = self._histogram(
            "generate_prefill_duration_seconds",
            "Seconds from a Generate's first step to the end of its prefill.",
            _WAIT_SECONDS,
        )
        self.first_token_seconds = self._histogram(
            "generate_first_token_seconds",
            "Seconds from accepting a Generate to its first token, queue included.",
            _WAIT_SECONDS,
        )
        self.inter_token_seconds = self._histogram(
            "generate_inter_token_seconds", "Seconds between two tokens of one Generate.", _STEP_SECONDS
        )
        self.drafted_tokens = self._counter("generate_drafted_tokens_total", "Guesses that were verified.")
        self.accepted_tokens = self._counter("generate_accepted_tokens_total", "Guesses that were right.")
        self.drafter_failures = self._counter(
            "generate_drafter_failures_total", "Generates that went on without the drafter because it raised."
        )
        self.non_finite_logits = self._counter(
            "generate_non_finite_logits_total", "Generates failed because the model gave NaN or infinity."
        )

    def _add_steps(self) -> None:
        self.step_seconds = self._histogram(
            "engine_step_seconds", "Seconds of one forward and its commit.", _STEP_SECONDS
        )
        self.step_rows = self._histogram("engine_step_rows", "Rows in one forward, over all its sessions.", _ROWS)

    def _add_server(self) -> None:
        self.rpc_total = Counter(
            "rpc_total", "Calls that ended, by method and gRPC code.", ("method", "code"), registry=self.registry
        )
        self.rpc_seconds = Histogram(
            "rpc_duration_seconds",
            "Seconds in a call, streams from first to last frame.",
            ("method",),
            buckets=_WAIT_SECONDS,
            registry=self.registry,
        )
        self.draining = self._gauge("server_draining", "1 while the server shuts down, else 0.")
        self._build_info = Gauge(
            "server_build_info",
            "Always 1; the labels say what runs.",
            ("version", "model", "device", "dtype", "mode"),
            registry=self.registry,
        )

    def set_build_info(self, *, version: str, model: str, device: str, dtype: str, mode: str) -> None:
        self._build_info.clear()
        self._build_info.labels(version=version, model=model, device=device, dtype=dtype, mode=mode).set(1)

    def count_transfer(self, kind: str, count: int) -> None:
        """`count` bytes moved between the device and the second tier; kind: one of TRANSFERS."""
        self._tier_transfers[kind].inc(count)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help_text: str, **labels: tuple[str, ...]) -> Counter:
        """A counter with at most one label, every known value of which is shown from the start, as 0."""
        counter = Counter(name, help_text, tuple(labels), registry=self.registry)
        for values in labels.values():
            for value in values:
                counter.labels(value)
        return counter
