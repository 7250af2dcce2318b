"""Trace propagation: the current OpenTelemetry span, if there is one, becomes the parent of the server's span.

OpenTelemetry is no dependency. Where an application has it installed, calls carry `traceparent` (W3C Trace Context).
"""

from __future__ import annotations

from collections.abc import Callable

Metadata = tuple[tuple[str, str], ...]


def _current() -> Callable[[], Metadata]:
    try:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return tuple
    propagator = TraceContextTextMapPropagator()

    def current() -> Metadata:
        carrier: dict[str, str] = {}
        propagator.inject(carrier)
        return tuple(carrier.items())

    return current


# Returns the metadata for the current span; empty without one.
trace_metadata = _current()
