"""`python -m tests.compose.receiver`: replaces the collector in the stack. OTLP over gRPC on 4317; GET /spans on 4318 lists all spans."""

import asyncio
import signal
from functools import partial

import grpc.aio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from tests.collector import Collector


async def list_spans(collector: Collector, _: web.Request) -> web.Response:
    """Returns name, trace and parent of every span, by the service that sent it."""
    return web.json_response(
        {
            service: [
                {"name": span.name, "trace": span.trace_id.hex(), "parent": span.parent_span_id.hex()} for span in spans
            ]
            for service, spans in collector.spans.items()
        }
    )


async def answer_health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def serve() -> None:
    """Runs until SIGTERM."""
    collector, server, stop = Collector(), grpc.aio.server(), asyncio.Event()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.add_insecure_port("0.0.0.0:4317")
    app = web.Application()
    app.router.add_get("/spans", partial(list_spans, collector))
    app.router.add_get("/health", answer_health)
    runner = web.AppRunner(app, handle_signals=False)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 4318).start()
    await stop.wait()
    await runner.cleanup()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve())
