"""OpenTelemetry spans of calls and of the parts of a Generate.

    kakeya.v1.RuntimeService/Generate       a child of the client's own span, if its metadata names one (`traceparent`)
      └─ generate                           its parameters and its outcome
           ├─ queue                         until the engine starts it
           ├─ wake                          old KV entries are restored, if the strategy restores them
           ├─ prefill                       until the first token; one event per chunk
           └─ decode                        until the end; an event `verify` for each step that verified a draft

Without a tracer nothing is recorded, at almost no cost. Spans hold counts, names and short hashes (those of
`logs.tag`): never token ids, keys or labels. Facts that OpenTelemetry's conventions for generative AI have an attribute
for are called so (`gen_ai.…`), others `kakeya.…`. The tracer's owner exports them (`server/trace_export.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | bool | int | float

# Per span; later events are only counted. A long Generate verifies thousands of drafts.
MOST_EVENTS = 100
_W3C = TraceContextTextMapPropagator()
# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans
_CONVENTIONS = {
    "history_length": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
}


class GenerateTrace:
    """The spans of one Generate. This class records nothing; see `Tracing.generate`."""

    def enter(self, part: str, *, ago_seconds: float = 0.0) -> None:
        """A part begins, or began so many seconds ago; the previous one ends."""

    def note(self, event: str, **facts: Value) -> None:
        """Record an event in the current part."""

    def end(self, *, error: str = "", **facts: Value) -> None:
        """The Generate ended. error: the reason, if it failed."""


OFF = GenerateTrace()


class _Recorded(GenerateTrace):
    """`enter` and `end` run on the engine's thread, except the first `enter`."""

    def __init__(self, tracer: Tracer, facts: Mapping[str, Value]) -> None:
        self._tracer = tracer
        kind = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "kakeya"}
        self._span = tracer.start_span("generate", attributes={**kind, **_attributes(facts)})
        self._context = trace.set_span_in_context(self._span)
        self._part: Span | None = None
        self._events = 0

    def enter(self, part: str, *, ago_seconds: float = 0.0) -> None:
        at = time.time_ns() - int(ago_seconds * 1e9)
        self._end_part(at)
        self._part = self._tracer.start_span(part, context=self._context, start_time=at)

    def note(self, event: str, **facts: Value) -> None:
        if self._part is not None and self._events < MOST_EVENTS:
            self._events += 1
            self._part.add_event(event, _attributes(facts))

    def end(self, *, error: str = "", **facts: Value) -> None:
        at = time.time_ns()
        self._end_part(at)
        self._span.set_attributes(_attributes(facts))
        if error:
            _fail(self._span, error)
        self._span.end(at)

    def _end_part(self, at: int) -> None:
        if self._part is not None:
            self._part.end(at)
        self._part, self._events = None, 0


class Tracing:
    """Makes spans with `tracer`; with None it makes none."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    @contextmanager
    def call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[None]:
        """A span around a call of `method` (`package.Service/Method`), current while it runs."""
        assert self._tracer is not None, "`call` needs a tracer"
        carrier = {name: value for name, value in metadata if isinstance(value, str)}
        service, _, name = method.partition("/")
        with self._tracer.start_as_current_span(
            method,
            context=_W3C.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
            record_exception=False,  # its text may quote what the client sent
            set_status_on_exception=False,
        ):
            yield

    def generate(self, **facts: Value) -> GenerateTrace:
        """Spans for a Generate that begins now, within the span that is current here."""
        if self._tracer is None:
            return OFF
        return _Recorded(self._tracer, facts)


def end_call(code: int, error: str = "") -> None:
    """Record on the current span how its call ended: a gRPC status code, and the reason of a runtime error."""
    span = trace.get_current_span()
    span.set_attribute("rpc.grpc.status_code", code)
    if code:
        _fail(span, error or str(code))


def describe(**facts: Value) -> None:
    """Set attributes of the current span, if it is recorded."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes(_attributes(facts))


def current_trace_id() -> str:
    """The trace id of the current span, as 32 hex digits; "" if there is none."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def _attributes(facts: Mapping[str, Value]) -> dict[str, Value]:
    return {_CONVENTIONS.get(name, f"kakeya.{name}"): value for name, value in facts.items()}


def _fail(span: Span, reason: str) -> None:
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))
