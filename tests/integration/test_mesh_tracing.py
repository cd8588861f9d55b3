"""One trace through the whole mesh: frontend, router, prefill and decode report spans of the client's own trace."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.integration.mesh import argv_simulated, running_mesh, wait_until


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP receiver that remembers spans by service."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[str, str, str]]] = {}

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            spans = self.spans.setdefault(attributes["service.name"], [])
            for scope in resource.scope_spans:
                spans += [(span.trace_id.hex(), span.name, span.parent_span_id.hex()) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def names_in(self, trace_id: str) -> set[str]:
        """Names of all spans of a trace, whoever made them."""
        return {name for spans in self.spans.values() for trace, name, _ in spans if trace == trace_id}


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and where it listens."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_trace_crosses_every_hop(tmp_path: Path) -> None:
    """The client's traceparent is the parent of the request's span, and that of every other's on the way."""
    trace_id, span_id = os.urandom(16).hex(), os.urandom(8).hex()
    async with collecting() as (collector, url):
        # The SDK gathers spans for 5 s by default, in each of four processes.
        env = {"KVMESH_TELEMETRY_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        async with running_mesh(tmp_path, *argv_simulated(), env=env) as mesh:
            body = {"model": "demo", "messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 5}
            headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
            address = f"{mesh.url}/v1/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(address, json=body, headers=headers) as answer:
                assert answer.status == 200
            wanted = {"request", "place", "prefill leg", "decode leg"}
            try:
                await wait_until(lambda: wanted <= collector.names_in(trace_id), 30.0, "all spans arrive")
            except TimeoutError:
                raise AssertionError(f"only {collector.names_in(trace_id)} arrived\n{mesh.logs()}") from None
    requests = [parent for spans in collector.spans.values() for trace, name, parent in spans if name == "request"]
    assert span_id in requests
