"""A real OTLP receiver for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the resource attributes and the spans that each service exported."""

    def __init__(self) -> None:
        self.url = ""
        self.resources: dict[str, dict[str, str]] = {}
        self.spans: dict[str, list[Any]] = {}

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.resources[attributes["service.name"]] = attributes
            spans = self.spans.setdefault(attributes["service.name"], [])
            for scope in resource.scope_spans:
                spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Any]:
        """Returns all spans of a trace, from all services."""
        return [span for spans in self.spans.values() for span in spans if span.trace_id.hex() == trace_id]


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Runs a collector on loopback."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        # If a server still runs when its loop is closed, the interpreter logs errors at exit.
        await server.stop(0)
