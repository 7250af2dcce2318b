"""Export of spans to a collector that speaks OTLP over gRPC, if `trace_endpoint` names one.

The exporter's packages are optional. They read OpenTelemetry's own environment variables, for
headers, sampling and resource attributes. A collector that takes no spans is logged once, and again when it does: the
exporter's own lines, several for each try, are not written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from inference_engine import __version__
from inference_engine.errors import ConfigError
from inference_engine.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

INSTALL = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
SERVICE = "kakeya"
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_ITS_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"

_log = logging.getLogger(__name__)


@contextmanager
def exported(endpoint: str) -> Iterator[Tracing]:
    """Tracing whose spans go to `endpoint` (http:// or https://, host, port), in the background, until the end.

    "" traces nothing. Raises ConfigError for an invalid endpoint, or if the exporter is not installed.
    """
    if not endpoint:
        yield Tracing()
        return
    tracing, close = _open(endpoint)
    try:
        yield tracing
    finally:
        close()


def check_exporter(endpoint: str) -> None:
    """Raises what `exported` would, without opening anything."""
    if not endpoint:
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
        raise ConfigError(f"trace_endpoint must be a URL like http://127.0.0.1:4317 (OTLP over gRPC), got {endpoint!r}")
    try:
        import_module(_EXPORTER)  # brings the SDK along
    except ImportError as error:
        raise ConfigError(
            f"trace_endpoint is set, but {error.name} is not installed: pip install {INSTALL}, or leave it unset"
        ) from error


def _open(endpoint: str) -> tuple[Tracing, Callable[[], None]]:
    check_exporter(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
    provider = TracerProvider(resource=resource)
    exporter = _Reporting(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http:")), endpoint)
    provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", exporter)))
    return Tracing(provider.get_tracer(SERVICE, __version__)), provider.shutdown


class _Reporting(logging.Filter):
    """Sends spans by `exporter`; says when that begins to fail and when it succeeds again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        super().__init__()
        self._exporter, self._endpoint = exporter, endpoint
        self._lost = 0
        self._reason = ""
        logging.getLogger(_ITS_LOGGER).addFilter(self)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            if not self._lost:
                _log.warning("the collector %s takes no spans, which are lost: %s", self._endpoint, self._reason)
            self._lost += len(spans)
        elif self._lost:
            _log.info("the collector %s takes spans again; %d were lost", self._endpoint, self._lost)
            self._lost = 0
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        self._exporter.shutdown()
        logging.getLogger(_ITS_LOGGER).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep what the exporter says of a failure, as its reason."""
        self._reason = record.getMessage()
        return False
