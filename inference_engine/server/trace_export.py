"""Export of spans to a collector that speaks OTLP over gRPC, if `trace_endpoint` names one.

The exporter's packages are optional. They read OpenTelemetry's own environment variables, for
headers, sampling and resource attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from urllib.parse import urlsplit

from inference_engine import __version__
from inference_engine.errors import ConfigError
from inference_engine.tracing import Tracing

INSTALL = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
SERVICE = "kakeya"
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


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
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http:"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer(SERVICE, __version__)), provider.shutdown
