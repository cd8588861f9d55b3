"""Spans of a request's later placements: each is the parent of its legs and links to the placement before it."""

from kvmesh.errors import MeshError
from kvmesh.telemetry import Span, Tracing, current_span, traceparent_of
from services.frontend.pipeline.prepare import Prepared


class LegSpans:
    """The first placement's legs are children of the request's span. `close` ends the open span."""

    _span: Span | None = None

    def traced(self, prepared: Prepared) -> Prepared:
        """Returns the request with the present placement's span as the parent of the spans of router and workers."""
        return prepared if self._span is None else prepared.with_traceparent(traceparent_of(self._span))

    def begin_next(self, tracing: Tracing, error: MeshError, *, number: int, emitted_tokens: int) -> None:
        """Begins the span of placement `number`, which follows the failure `error` of the one before it."""
        if not tracing.is_on:
            return
        before = self._span or current_span()
        attributes = {
            "kvmesh.attempt": number,
            "kvmesh.reason": error.reason,
            "kvmesh.failed_at": error.where,
            "kvmesh.emitted_tokens": emitted_tokens,
        }
        span = tracing.start_span("placed_again", attributes=attributes, links=(before,))
        self.close()
        self._span = span

    def close(self) -> None:
        if self._span is not None:
            self._span.end()
