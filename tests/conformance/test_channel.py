"""One suite for both transports: grpc.aio on loopback and MemoryNetwork give clients and servicers the same guarantees."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from kvmesh.api.decode.v1 import decode_pb2_grpc
from kvmesh.api.types.v1 import kv_pb2
from kvmesh.api.worker.v1 import legs_pb2, worker_pb2, worker_pb2_grpc
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LostError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.deadline import remaining_s
from kvmesh.rpc.health import GrpcHealth
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.status import from_rpc_error
from kvmesh.simulation.rpc import MemoryNetwork
from kvmesh.telemetry import Telemetry, TelemetrySettings, Tracing, current_traceparent
from tests.patience import PATIENCE_S
from tests.worker_rig import wait_until

MESSAGE_BYTES_MAX = 64 * 1024
SERVICE_NAMES = ("kvmesh.worker.v1.WorkerService", "kvmesh.decode.v1.DecodeService")
# With this epoch the servicer below sends messages of 40 kB.
LARGE = 3
JOIN = "kvmesh.test.Joiner"


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A small real servicer that records how its calls ended."""

    def __init__(self) -> None:
        self.drains = 0
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.remaining: list[float | None] = []
        self.traceparents: list[str] = []
        self.sent = 0

    async def Describe(self, request: Any, context: Any) -> Any:
        self.remaining.append(remaining_s(context))
        self.traceparents.append(current_traceparent())
        await context.send_initial_metadata((("x-first", "1"),))
        context.set_trailing_metadata((("x-last", dict(context.invocation_metadata()).get("x-word", "none")),))
        return worker_pb2.DescribeResponse(block_size_tokens=32)

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        if request.source:
            raise InvalidRequestError(request.source, field="source." + request.source)
        raise OverloadedError("busy", reason="adapters_full", field="name", retry_after_s=2.5, where="w1")

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        raise KeyError("a secret that no client may see")

    async def ResetCache(self, request: Any, context: Any) -> Any:
        raise CancelledByCallerError("the request was cancelled")

    async def Drain(self, request: Any, context: Any) -> Any:
        self.drains += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ends.put_nowait("drain cancelled")
            raise

    async def WatchKv(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            events = [kv_pb2.KvEvent()] * 20_000 if request.resume_epoch == LARGE else []
            for sequence in range(request.resume_sequence):
                yield worker_pb2.WatchKvResponse(sequence=sequence, epoch=7, events=events)
                self.sent += 1
            if request.resume_epoch == 1:
                raise UnavailableError("draining", reason="draining")
            if request.resume_epoch == 2:
                await asyncio.Event().wait()
        finally:
            self.ends.put_nowait("watch ended")

    async def SetRole(self, request: Any, context: Any) -> Any:
        return worker_pb2.SetRoleResponse(role=1 if (remaining_s(context) or 1000.0) < 1000.0 else 2)


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """Answers each submission with a finish."""

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        first = await anext(request_iterator)
        yield legs_pb2.AttachResponse(welcome=legs_pb2.Welcome(worker_id=first.hello.frontend_id))
        async for request in request_iterator:
            finishes = [legs_pb2.Finish(slot=each.slot) for each in request.submissions]
            yield legs_pb2.AttachResponse(frame=legs_pb2.StepFrame(finishes=finishes))

    async def Generate(self, request: Any, context: Any) -> None:
        # Uses the reader-writer style, which grpc.aio supports too.
        for token in range(3):
            await context.write(legs_pb2.GenerateResponse(token_ids=[token]))


def plain(leg_id: str) -> legs_pb2.GenerateRequest:
    return legs_pb2.GenerateRequest(leg=legs_pb2.Leg(leg_id=leg_id))


async def join(requests: Any, context: Any) -> Any:
    """A client-streaming method. The contracts have none, but both transports support them."""
    ids = [request.leg.leg_id async for request in requests]
    return plain(",".join(ids))


def add_services(worker: Worker, server: Any) -> None:
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Decode(), server)
    handler = grpc.stream_unary_rpc_method_handler(
        join,
        request_deserializer=legs_pb2.GenerateRequest.FromString,
        response_serializer=legs_pb2.GenerateRequest.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(JOIN, {"Join": handler}),))


class Mesh:
    """A server, a channel pool, and the telemetry of both."""

    def __init__(self, worker: Worker, pool: Any, address: str, kill: Callable[[], Any]) -> None:
        self.worker, self.pool, self.address, self.kill = worker, pool, address, kill

    @property
    def stub(self) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.pool.channel(self.address))

    @property
    def decode(self) -> Any:
        return decode_pb2_grpc.DecodeServiceStub(self.pool.channel(self.address))

    async def ended(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.worker.ends.get()


def telemetry(name: str) -> tuple[Telemetry, InMemorySpanExporter]:
    spans = InMemorySpanExporter()
    tracing = Tracing(TelemetrySettings(), service=name, span_processor=SimpleSpanProcessor(spans))
    return Telemetry.create(name, tracing=tracing), spans


@pytest.fixture(params=["grpc", "memory"])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    worker = Worker()
    server_side, server_spans = telemetry("worker")
    client_side, client_spans = telemetry("frontend")
    if request.param == "grpc":
        settings = RpcSettings(message_bytes_max=MESSAGE_BYTES_MAX, grace_s=0.0)
        server = RpcServer(
            settings,
            service_names=SERVICE_NAMES,
            add_services=lambda server: add_services(worker, server),
            interceptors=server_interceptors(server_side),
        )
        await server.start()
        await server.set_serving(True)
        made = Mesh(
            worker=worker,
            pool=ChannelPool(settings=settings, interceptors=channel_interceptors(client_side)),
            address=server.address,
            kill=server.aclose,
        )
        close = server.aclose
    else:
        network = MemoryNetwork(message_bytes_max=MESSAGE_BYTES_MAX)
        memory = network.server("w1:1", interceptors=server_interceptors(server_side))
        add_services(worker, memory)
        await GrpcHealth(SERVICE_NAMES, is_serving=True).add_to(memory)
        await memory.start()

        async def kill() -> None:
            network.kill("w1:1")

        async def stop() -> None:
            await memory.stop(0)

        made, close = (
            Mesh(worker=worker, pool=network.pool(channel_interceptors(client_side)), address="w1:1", kill=kill),
            stop,
        )
    made.server_side, made.client_side = server_side, client_side  # type: ignore[attr-defined]
    made.server_spans, made.client_spans = server_spans, client_spans  # type: ignore[attr-defined]
    yield made
    await made.pool.aclose()
    await close()


async def failure(call: Any, **how: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value, **how)


async def test_unary_with_metadata(mesh: Mesh) -> None:
    """A unary call returns a response. Metadata travels both ways, and status and details are available afterwards."""
    call = mesh.stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S, metadata=(("x-word", "hi"),))
    assert (await call).block_size_tokens == 32
    assert (await call.initial_metadata()).get("x-first") == "1"
    assert (await call.trailing_metadata()).get("x-last") == "hi"
    assert await call.code() is grpc.StatusCode.OK
    assert call.done()
    assert not call.cancelled()


async def test_server_stream_in_order(mesh: Mesh) -> None:
    """All messages arrive in order, followed by the end of the stream, by iteration and by `read`."""
    request = worker_pb2.WatchKvRequest(resume_sequence=100)
    assert [each.sequence async for each in mesh.stub.WatchKv(request)] == list(range(100))
    call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=1))
    assert (await call.read()).epoch == 7
    assert await call.read() is grpc.aio.EOF
    assert await call.read() is grpc.aio.EOF


async def test_writer_style_servicer(mesh: Mesh) -> None:
    """A servicer may call `write` instead of yielding."""
    call = mesh.decode.Generate(legs_pb2.GenerateRequest())
    assert [list(each.token_ids) async for each in call] == [[0], [1], [2]]


async def test_client_stream(mesh: Mesh) -> None:
    """A servicer receives requests from an iterator and from `write`, and responds once."""
    method = mesh.pool.channel(mesh.address).stream_unary(
        f"/{JOIN}/Join",
        request_serializer=legs_pb2.GenerateRequest.SerializeToString,
        response_deserializer=legs_pb2.GenerateRequest.FromString,
    )

    async def requests() -> AsyncIterator[Any]:
        for name in "abc":
            yield plain(name)

    assert (await method(requests())).leg.leg_id == "a,b,c"
    call = method()
    await call.write(plain("x"))
    await call.done_writing()
    assert (await call).leg.leg_id == "x"


async def test_bidi_by_write_and_read(mesh: Mesh) -> None:
    """Both sides take turns on one stream. After the client half-closes, the stream ends with OK."""
    call = mesh.decode.Attach()
    await call.write(legs_pb2.AttachRequest(hello=legs_pb2.Hello(frontend_id="f1")))
    assert (await call.read()).welcome.worker_id == "f1"
    for slot in range(50):
        await call.write(legs_pb2.AttachRequest(submissions=[legs_pb2.Submission(slot=slot)]))
        assert (await call.read()).frame.finishes[0].slot == slot
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_mesh_error_round_trip(mesh: Mesh) -> None:
    """The client gets the error that the servicer raised, with every field."""
    error = await failure(mesh.stub.LoadAdapter(worker_pb2.LoadAdapterRequest()), where="ignored")
    assert type(error) is OverloadedError
    assert vars(error) == vars(
        OverloadedError("busy", reason="adapters_full", field="name", retry_after_s=2.5, where="w1")
    )


@pytest.mark.parametrize("letter", ["m", "é", "😀"])
async def test_a_long_error_fits_into_the_trailers(mesh: Mesh, letter: str) -> None:
    """An error with a very long message arrives with its own type, truncated if necessary, and never as a transport failure."""
    error = await failure(mesh.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(source=letter * 2000)))
    assert type(error) is InvalidRequestError
    assert error.reason == "invalid_request"
    assert error.message.startswith(letter * 400)


async def test_error_inside_a_stream(mesh: Mesh) -> None:
    """Messages sent before a failure arrive before it."""
    call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=2, resume_epoch=1))
    got = [(await call.read()).sequence for _ in range(2)]
    error = await failure(call.read(), has_begun=True)
    assert (got, type(error), error.reason) == ([0, 1], UnavailableError, "draining")


async def test_clients_do_not_see_internal_errors(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception is logged with a request id. The client gets only the id."""
    with caplog.at_level(logging.ERROR):
        error = await failure(mesh.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest()))
    assert type(error) is InternalError
    assert error.message == f"internal error {error.request_id}"
    logged = next(each for each in caplog.records if each.getMessage() == "rpc_defect")
    assert logged.data["request_id"] == error.request_id  # type: ignore[attr-defined]
    assert "a secret" in str(logged.exc_info[1])  # type: ignore[index]


async def test_unimplemented(mesh: Mesh) -> None:
    """Methods that a servicer does not implement, and unknown methods, are unsupported and not internal errors."""
    error = await failure(mesh.stub.Sleep(worker_pb2.SleepRequest()))
    assert type(error) is UnsupportedError
    unknown = mesh.pool.channel(mesh.address).unary_unary("/kvmesh.test.None/None", lambda _: b"", lambda raw: raw)
    assert type(await failure(unknown(b""))) is UnsupportedError


async def test_deadline(mesh: Mesh) -> None:
    """The deadline ends the call on both sides, and the servicer can read it."""
    await mesh.stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
    await mesh.stub.Describe(worker_pb2.DescribeRequest())
    left, none = mesh.worker.remaining
    assert left is not None
    # gRPC rounds deadlines on the wire.
    assert PATIENCE_S / 2 < left <= PATIENCE_S + 0.1
    assert none is None
    assert (await mesh.stub.SetRole(worker_pb2.SetRoleRequest(), timeout=PATIENCE_S)).role == 1
    assert (await mesh.stub.SetRole(worker_pb2.SetRoleRequest())).role == 2
    timeout_s = 0.05
    while not mesh.worker.drains:
        # A call whose deadline passes before it reaches the servicer shows nothing about the servicer.
        error = await failure(mesh.stub.Drain(worker_pb2.DrainRequest(), timeout=timeout_s))
        assert type(error) is DeadlineError
        timeout_s = min(4 * timeout_s, PATIENCE_S)
    assert await mesh.ended() == "drain cancelled"


async def test_cancel_reaches_a_unary_servicer(mesh: Mesh) -> None:
    """Cancelling the awaiting task cancels the servicer."""
    waiting = asyncio.ensure_future(_await(mesh.stub.Drain(worker_pb2.DrainRequest())))
    await wait_until(lambda: mesh.worker.drains == 1, "the servicer has the call")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await mesh.ended() == "drain cancelled"


async def test_cancel_reaches_a_streaming_servicer(mesh: Mesh) -> None:
    """A cancel closes the servicer's generator immediately. The client's own reads raise CancelledError."""
    call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=1, resume_epoch=2))
    assert (await call.read()).sequence == 0
    assert call.cancel()
    assert await mesh.ended() == "watch ended"
    assert call.cancelled()
    assert await call.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    assert not call.cancel()


async def test_a_generator_at_a_yield_is_closed_without_the_garbage_collector(mesh: Mesh) -> None:
    """The servicer blocks in a write because the client does not read. A cancel still runs its `finally` immediately."""
    gc.disable()
    try:
        call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=5_000_000))
        await call.read()
        await asyncio.sleep(0.05)
        call.cancel()
        assert await mesh.ended() == "watch ended"
    finally:
        gc.enable()


async def test_backpressure(mesh: Mesh) -> None:
    """A servicer pauses while the client does not read, so that buffers stay bounded."""
    call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=5_000_000, resume_epoch=LARGE))
    await call.read()
    sent = -1
    async with asyncio.timeout(PATIENCE_S):
        while sent != mesh.worker.sent:
            sent = mesh.worker.sent
            await asyncio.sleep(0.2)
    assert sent < 1000
    call.cancel()
    assert await mesh.ended() == "watch ended"


async def test_server_death(mesh: Mesh) -> None:
    """When a server dies, its calls fail immediately: as lost if the stream had begun, otherwise as unavailable. New calls are refused."""
    stream = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=1, resume_epoch=2))
    await stream.read()
    unary = asyncio.ensure_future(failure(mesh.stub.Drain(worker_pb2.DrainRequest()), where="w1"))
    await wait_until(lambda: mesh.worker.drains == 1, "the servicer has the call")
    await mesh.kill()
    async with asyncio.timeout(PATIENCE_S):
        error = await failure(stream.read(), where="w1", has_begun=True)
        assert (type(error), error.where, error.message) == (LostError, "w1", "the connection to w1 broke")
        assert type(await unary) is UnavailableError
        refused = await failure(mesh.stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S))
    # gRPC's own message ("Stream removed (Socket closed)") would not help a client.
    assert (type(refused), refused.message) == (UnavailableError, "the server cannot be reached")
    assert {await mesh.ended(), await mesh.ended()} == {"drain cancelled", "watch ended"}


async def test_dropping_a_channel_cancels_its_calls(mesh: Mesh) -> None:
    """Dropping an address from the pool cancels its calls. The next channel is a new one."""
    call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=1, resume_epoch=2))
    await call.read()
    await mesh.pool.drop(mesh.address)
    assert await mesh.ended() == "watch ended"
    assert call.cancelled()
    assert (await mesh.stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)).block_size_tokens == 32
    await mesh.pool.aclose()
    with pytest.raises(UnavailableError):
        mesh.pool.channel(mesh.address)


async def test_large_messages_are_refused(mesh: Mesh) -> None:
    """A message over the limit is the caller's error, and the channel stays usable."""
    name = "n" * (MESSAGE_BYTES_MAX + 1)
    error = await failure(mesh.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(name=name)))
    assert (type(error), error.reason) == (InvalidRequestError, "message_too_large")
    assert (await mesh.stub.Describe(worker_pb2.DescribeRequest())).block_size_tokens == 32


async def test_health(mesh: Mesh) -> None:
    """grpc.health.v1 reports the server and its services as serving, and does not know other services."""
    stub = health_pb2_grpc.HealthStub(mesh.pool.channel(mesh.address))
    for name in ("", *SERVICE_NAMES):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="none"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_trace_context_crosses(mesh: Any) -> None:
    """Client and server spans belong to one trace as parent and child. The servicer's code runs inside its span."""
    with mesh.client_side.tracing.span("request") as root:
        await mesh.stub.Describe(worker_pb2.DescribeRequest())
        await failure(mesh.stub.LoadAdapter(worker_pb2.LoadAdapterRequest()))
    trace_id = root.get_span_context().trace_id
    # A side may end its span after the other side has the result.
    await wait_until(lambda: len(mesh.client_spans.get_finished_spans()) >= 3, "the client has ended its spans")
    await wait_until(lambda: len(mesh.server_spans.get_finished_spans()) >= 2, "the server has ended its spans")
    client = {each.name: each for each in mesh.client_spans.get_finished_spans()}
    server = {each.name: each for each in mesh.server_spans.get_finished_spans()}
    for name in ("kvmesh.worker.v1.WorkerService/Describe", "kvmesh.worker.v1.WorkerService/LoadAdapter"):
        assert client[name].context.trace_id == server[name].context.trace_id == trace_id
        assert server[name].parent.span_id == client[name].context.span_id
        assert client[name].parent.span_id == root.get_span_context().span_id
    described = server["kvmesh.worker.v1.WorkerService/Describe"].context
    (seen,) = mesh.worker.traceparents
    assert seen.startswith(f"00-{described.trace_id:032x}-{described.span_id:016x}-")
    failed = server["kvmesh.worker.v1.WorkerService/LoadAdapter"]
    assert failed.attributes["error.type"] == "adapters_full"
    assert not failed.status.is_ok


async def test_calls_are_counted_on_both_sides(mesh: Any) -> None:
    """The metrics of both sides count each call with its method, code and reason."""
    await mesh.stub.Describe(worker_pb2.DescribeRequest())
    await failure(mesh.stub.LoadAdapter(worker_pb2.LoadAdapterRequest()))
    call = mesh.stub.WatchKv(worker_pb2.WatchKvRequest(resume_sequence=1, resume_epoch=2))
    await call.read()
    call.cancel()
    await mesh.ended()
    for side, telemetry in (("server", mesh.server_side), ("client", mesh.client_side)):
        counted = telemetry.registry.get_sample_value
        name = f"kvmesh_{'worker' if side == 'server' else 'frontend'}_rpc_{side}_finished_calls_total"

        def calls(method: str, code: str, reason: str, name: str = name, counted: Any = counted) -> Any:
            labels = {"method": f"kvmesh.worker.v1.WorkerService/{method}", "code": code, "reason": reason}
            return counted(name, labels)

        # A side may count a call after the other side has its end.
        await wait_until(
            partial(calls, "WatchKv", "CANCELLED", "cancelled"), f"the {side} has counted the cancelled call"
        )
        assert calls("Describe", "OK", "none") == 1
        assert calls("LoadAdapter", "RESOURCE_EXHAUSTED", "adapters_full") == 1
        assert calls("WatchKv", "CANCELLED", "cancelled") == 1
        assert f"rpc_{side}_duration_seconds_bucket" in generate_latest(telemetry.registry).decode()


async def test_a_servicer_may_raise_cancelled(mesh: Mesh) -> None:
    """A servicer may raise that the request was cancelled. The client gets a typed error, not a cancelled call."""
    call = mesh.stub.ResetCache(worker_pb2.ResetCacheRequest())
    assert type(await failure(call)) is CancelledByCallerError


async def _await(call: Any) -> Any:
    return await call
