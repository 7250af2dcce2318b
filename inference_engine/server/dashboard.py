"""The data of the dashboard: the current state, and the last ten minutes as one point every two seconds.

    counters and histograms ── a Reading every 2 s ──▶ the last of them and one from 30 s before ──▶ a Point

Rates, shares and percentiles cover the time between two readings, so the page shows the current load, not averages
since the start. Percentiles are interpolated linearly within histogram buckets, like in Prometheus.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from inference_engine.metrics import STEP_PARTS, EngineMetrics

SAMPLE_SECONDS = 2.0
POINTS = 300
WINDOW_POINTS = 15  # covered by a rate or a percentile
PERCENTILES = (50, 95, 99)
_DIGITS = 4

Point = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: how many observations were at most each bound, the last of which is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    def since(self, earlier: Buckets) -> Buckets:
        return Buckets(self.bounds, tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True)))

    def percentile(self, percent: float) -> float | None:
        """None without observations. Values beyond the last finite bound count as that bound."""
        total = self.counts[-1] if self.counts else 0.0
        if total <= 0:
            return None
        rank = total * percent / 100
        edges = pairwise([(0.0, 0.0), *zip(self.bounds, self.counts, strict=True)])
        for (low, below), (high, count) in edges:
            if count >= rank:
                return low if math.isinf(high) else low + (high - low) * (rank - below) / max(count - below, 1e-12)
        raise AssertionError("the last bound is infinite")


@dataclass(frozen=True, slots=True)
class Reading:
    """The counts at a moment (monotonic seconds)."""

    at: float
    counts: Mapping[str, float]
    histograms: Mapping[str, Buckets]


class Dashboard:
    """Reads an engine's metrics. Thread-safe."""

    def __init__(
        self,
        metrics: EngineMetrics,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._lock = threading.Lock()
        self._readings: deque[Reading] = deque([self._read()], maxlen=WINDOW_POINTS + 1)
        self._points: deque[Point] = deque(maxlen=POINTS)

    def sample(self) -> None:
        """Add a point. Call it every SAMPLE_SECONDS."""
        self._metrics.look()
        with self._lock:
            reading = self._read()
            if reading.at > self._readings[-1].at:
                self._readings.append(reading)
                self._points.append(self._point(self._readings[0], reading))

    def data(self) -> dict[str, Any]:
        """All data of the page. Values are counts, bytes, seconds, tokens per second, or shares of 1."""
        metrics = self._metrics
        metrics.look()
        with self._lock:
            points = list(self._points)
        names = list(points[-1]) if points else []
        return {
            "now": round(self._wall(), 3),
            "uptime_seconds": round(self._clock() - self._began),
            "sample_seconds": SAMPLE_SECONDS,
            "window_seconds": SAMPLE_SECONDS * WINDOW_POINTS,
            "server": next(iter(_labelled(metrics.build_info)), {}),
            "draining": bool(_value(metrics.draining)),
            "beat_age_seconds": round(_value(metrics.beat_age), 1),
            "sessions": [
                {**labels, "count": int(count)} for labels, count in _samples(metrics.session_states) if count
            ],
            "bytes": {
                "kinds": {labels["kind"]: int(count) for labels, count in _samples(metrics.kv_bytes)},
                "reserved": int(_value(metrics.kv_reserved_bytes)),
                "capacity": int(_value(metrics.kv_capacity_bytes)),
                "tier": int(_value(metrics.tier_live_bytes)),
                "tier_reserved": int(_value(metrics.tier_reserved_bytes)),
                "tier_capacity": int(_value(metrics.tier_capacity_bytes)),
            },
            "totals": {name: int(count) for name, count in self._read().counts.items()},
            "ended": _by_label(metrics.generates, "outcome"),
            "errors": _by_label(metrics.rpc_errors, "reason"),
            "evicted": {
                **{cause: count for cause, count in _by_label(metrics.evicted, "reason").items() if cause != "close"},
                **({"dropped to tokens": dropped} if (dropped := int(_value(metrics.dropped))) else {}),
            },
            "points": {name: [point[name] for point in points] for name in names},
        }

    def _read(self) -> Reading:
        metrics = self._metrics
        return Reading(
            at=self._clock(),
            counts={
                "tokens": _value(metrics.generated_tokens),
                "prefilled": _value(metrics.prefilled_tokens),
                "drafted": _value(metrics.drafted_tokens),
                "accepted": _value(metrics.accepted_tokens),
                "stalls": _value(metrics.stalls),
                "steps": _total(metrics.step_sessions, "_count"),
                "stepped": _total(metrics.step_sessions, "_sum"),
                **{f"{labels['part']}_seconds": total for labels, total in _samples(metrics.step_parts, "_sum")},
            },
            histograms={
                "queue": _buckets(metrics.queue_seconds),
                "first_token": _buckets(metrics.first_token_seconds),
                "inter_token": _buckets(metrics.inter_token_seconds),
            },
        )

    def _point(self, first: Reading, last: Reading) -> Point:
        seconds = last.at - first.at
        grown = {name: last.counts[name] - first.counts[name] for name in last.counts}
        stepping = sum(grown[f"{part}_seconds"] for part in STEP_PARTS)
        shares = {f"{part}_share": _ratio(grown[f"{part}_seconds"], stepping) for part in STEP_PARTS}
        percentiles = {
            f"{name}_p{percent}": buckets.since(first.histograms[name]).percentile(percent)
            for name, buckets in last.histograms.items()
            for percent in PERCENTILES
        }
        point: Point = {
            "tokens_per_second": grown["tokens"] / seconds,
            "prefilled_per_second": grown["prefilled"] / seconds,
            "acceptance": _ratio(grown["accepted"], grown["drafted"]),
            "running": _value(self._metrics.generates_active),
            "waiting": _value(self._metrics.queue_depth),
            "batch": _ratio(grown["stepped"], grown["steps"]),
            "busy": min(1.0, stepping / seconds),
            **shares,
            **percentiles,
        }
        return {"at": round(self._wall(), 1), **{name: _rounded(value) for name, value in point.items()}}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    """Rounded to the digits that a chart can show."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _samples(instrument: MetricWrapperBase, suffix: str | None = None) -> list[tuple[dict[str, str], float]]:
    """Labels and values of an instrument; suffix: of the samples named so, such as `_sum`."""
    return [
        (sample.labels, sample.value)
        for family in instrument.collect()
        for sample in family.samples
        if not sample.name.endswith("_created") and (suffix is None or sample.name.endswith(suffix))
    ]


def _value(instrument: MetricWrapperBase) -> float:
    return _samples(instrument)[0][1]


def _total(instrument: MetricWrapperBase, suffix: str) -> float:
    return _samples(instrument, suffix)[0][1]


def _labelled(instrument: MetricWrapperBase) -> Sequence[dict[str, str]]:
    return [labels for labels, _ in _samples(instrument)]


def _by_label(instrument: MetricWrapperBase, label: str) -> dict[str, int]:
    """Counts that are not zero, largest first."""
    counts = {labels[label]: int(count) for labels, count in _samples(instrument) if count}
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _buckets(instrument: MetricWrapperBase) -> Buckets:
    samples = _samples(instrument, "_bucket")
    return Buckets(
        tuple(float(labels["le"]) for labels, _ in samples),
        tuple(count for _, count in samples),
    )
