"""OpenTelemetry spans, and the W3C trace context that links them across processes.

Without an exporter there are no spans and the SDK is not imported. A caller's trace context still passes through every process and
into the logs, so that a mesh without tracing does not break its callers' traces.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvmesh.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")


class Tracing:
    """Makes spans. A Part: `aclose` exports the remaining spans within the export's timeout."""

    def __init__(
        self,
        settings: TelemetrySettings,
        *,
        service: str,
        instance_id: str = "",
        span_processor: "SpanProcessor | None" = None,
    ) -> None:
        self._timeout_s = settings.otlp_timeout_s
        self._provider = _provider(settings, service=service, instance_id=instance_id, processor=span_processor)
        self._tracer = None if self._provider is None else self._provider.get_tracer("kvmesh")

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    async def start(self) -> None:
        """Part of the Part interface."""

    async def aclose(self) -> None:
        """Exports the last spans. Idempotent."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is not None:
            # Shutting down joins the exporter's thread. After the timeout the process exits without it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.to_thread(provider.shutdown)

    def start_span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Span] = (),
    ) -> Span:
        """Starts a span, which the caller must end. It is a child of `parent` (a traceparent) or else of the current span."""
        above = otel_context.get_current() if parent is None else _context_of(parent)
        if self._tracer is None:
            return trace.get_current_span(above)
        linked = [Link(span.get_span_context()) for span in links]
        return self._tracer.start_span(name, context=above, kind=kind, attributes=attributes, links=linked)

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Iterator[Span]:
        """Inside, the span is current. It ends with the block, as failed if an exception leaves the block."""
        span = self.start_span(name, kind=kind, parent=parent, attributes=attributes)
        is_own = self._tracer is not None
        with trace.use_span(span, end_on_exit=is_own, record_exception=False, set_status_on_exception=is_own):
            yield span


def is_traceparent(text: str) -> bool:
    """Returns whether a client's text has the form of a traceparent. W3C: another one must be ignored."""
    return text.isascii() and _TRACEPARENT.match(text) is not None


def current_span() -> Span:
    """Returns the span that is current in this task; without a trace, one that records nothing."""
    return trace.get_current_span()


def traceparent_of(span: Span) -> str:
    """Returns the span's W3C traceparent; empty without a trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


def current_traceparent() -> str:
    """Returns the current span's W3C traceparent; empty without a trace."""
    return traceparent_of(trace.get_current_span())


def fail_span(span: Span, words: str) -> None:
    span.set_status(Status(StatusCode.ERROR, words))


def _context_of(traceparent: str) -> otel_context.Context:
    # Starts from an empty context: a server's parent is the caller, never the span that is current in this task.
    empty = otel_context.Context()
    match = _TRACEPARENT.match(traceparent)
    # W3C Trace Context: the version ff is invalid, and version 00 has no further fields.
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return empty
    parent = SpanContext(
        trace_id=int(match[2], 16), span_id=int(match[3], 16), is_remote=True, trace_flags=TraceFlags(int(match[4], 16))
    )
    return trace.set_span_in_context(NonRecordingSpan(parent), empty) if parent.is_valid else empty


def _provider(
    settings: TelemetrySettings, *, service: str, instance_id: str, processor: "SpanProcessor | None"
) -> "TracerProvider | None":
    if not settings.otlp_endpoint and processor is None:
        return None
    # These imports take half a second.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = {"service.namespace": "kvmesh", "service.name": service, "service.instance.id": instance_id}
    provider = TracerProvider(
        resource=Resource.create({key: value for key, value in resource.items() if value}),
        sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor or _otlp_processor(settings))
    return provider


def _otlp_processor(settings: TelemetrySettings) -> "SpanProcessor":
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=not settings.otlp_endpoint.startswith("https://"),
        timeout=settings.otlp_timeout_s,
    )
    return BatchSpanProcessor(
        exporter,
        max_queue_size=settings.spans_max,
        max_export_batch_size=min(512, settings.spans_max),
        export_timeout_millis=settings.otlp_timeout_s * 1000,
    )
