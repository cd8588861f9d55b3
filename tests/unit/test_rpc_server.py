"""A gRPC server and the channel pool: health, reflection, shutdown, lost peers and bounds."""

import asyncio
import socket
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvmesh.api.worker.v1 import worker_pb2, worker_pb2_grpc
from kvmesh.errors import LostError, OverloadedError
from kvmesh.rpc.channels import UNUSED_S, ChannelPool
from kvmesh.rpc.interceptors import channel_interceptors, server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import PublicRpcSettings, RpcSettings
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import Telemetry
from tests.conformance.tcp_proxy import TcpProxy
from tests.patience import PATIENCE_S
from tests.servers import closed_port

NAME = "kvmesh.worker.v1.WorkerService"
States = health_pb2.HealthCheckResponse


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.is_draining, self.may_end = asyncio.Event(), asyncio.Event()

    async def Wake(self, request: Any, context: Any) -> Any:
        return worker_pb2.WakeResponse()

    async def WatchKv(self, request: Any, context: Any) -> Any:
        yield worker_pb2.WatchKvResponse()
        await asyncio.Event().wait()

    async def Drain(self, request: Any, context: Any) -> Any:
        self.is_draining.set()
        await self.may_end.wait()
        return worker_pb2.DrainResponse()


def make_server(settings: RpcSettings, worker: Worker | None = None) -> RpcServer:
    return RpcServer(
        settings,
        service_names=[NAME],
        add_services=lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker or Worker(), server),
        interceptors=server_interceptors(Telemetry.create("worker")),
    )


def patient(**settings: Any) -> RpcSettings:
    """Returns settings of channels that do not give up a connection which is set up slowly."""
    return RpcSettings(connect_timeout_s=PATIENCE_S, **settings)


async def test_health_follows_the_state_of_the_server() -> None:
    """The status is NOT_SERVING at first and again when closing starts. Watchers receive every change."""
    settings = patient(grace_s=PATIENCE_S)
    server, pool = make_server(settings), ChannelPool(settings=settings)
    assert server.port == 0
    await server.start()
    watch = health_pb2_grpc.HealthStub(pool.channel(server.address)).Watch(health_pb2.HealthCheckRequest(service=NAME))
    seen = [(await watch.read()).status]
    await server.set_serving(True)
    seen.append((await watch.read()).status)
    closing = asyncio.create_task(server.aclose())
    seen.append((await watch.read()).status)
    assert seen == [States.NOT_SERVING, States.SERVING, States.NOT_SERVING]
    watch.cancel()
    await closing
    await server.aclose()
    await pool.aclose()


async def test_calls_in_flight_finish_within_the_grace_time() -> None:
    """A call that ends within the grace time succeeds although the server is stopping."""
    settings, worker = patient(grace_s=PATIENCE_S), Worker()
    server, pool = make_server(settings, worker), ChannelPool(settings=settings)
    await server.start()
    stub = worker_pb2_grpc.WorkerServiceStub(pool.channel(server.address))
    call = stub.Drain(worker_pb2.DrainRequest())
    async with asyncio.timeout(PATIENCE_S):
        await worker.is_draining.wait()
        closing = asyncio.create_task(server.aclose())
        # The server refuses new calls from the moment when it begins to stop.
        while await stub.Wake(worker_pb2.WakeRequest()).code() is grpc.StatusCode.OK:
            pass
        # Without grace, the stop ends soon, and the call with it.
        await asyncio.wait([closing], timeout=0.2)
        assert not closing.done()
        worker.may_end.set()
        assert (await call).requests_in_flight == 0
        await closing
    await pool.aclose()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_services(version: str) -> None:
    """Both versions of reflection list all services and return their descriptors, as grpcurl needs."""
    settings = patient(grace_s=0)
    server, pool = make_server(settings), ChannelPool(settings=settings)
    await server.start()
    ask = pool.channel(server.address).stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {each.name for each in (await call.read()).list_services_response.service}
    assert {NAME, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= listed
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME))
    files = (await call.read()).file_descriptor_response.file_descriptor_proto
    assert any(b"kvmesh/worker/v1/worker.proto" in each for each in files)
    call.cancel()
    await pool.aclose()
    await server.aclose()


async def test_channelz_is_served() -> None:
    """The server exposes gRPC's own statistics."""
    settings = patient(grace_s=0)
    server, pool = make_server(settings), ChannelPool(settings=settings)
    await server.start()
    answer = await channelz_pb2_grpc.ChannelzStub(pool.channel(server.address)).GetServers(
        channelz_pb2.GetServersRequest()
    )
    assert any(each.data.calls_started > 0 for each in answer.server)
    await pool.aclose()
    await server.aclose()


async def test_a_port_in_use_is_an_error() -> None:
    """Two processes never share a port by accident, and the error names the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match=f"127.0.0.1:{taken.getsockname()[1]}"):
            await make_server(RpcSettings(port=taken.getsockname()[1])).start()
    first = make_server(RpcSettings(grace_s=0))
    await first.start()
    with pytest.raises(OSError, match="in use"):
        await make_server(RpcSettings(port=first.port)).start()
    await first.aclose()


KILLED_SERVER = """
import asyncio
from tests.unit.test_rpc_server import make_server
from kvmesh.rpc.settings import RpcSettings

async def main():
    server = make_server(RpcSettings())
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_process_breaks_its_calls_at_once() -> None:
    """`kill -9` ends calls in flight with LostError, without waiting for the keepalive."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_SERVER, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    pool = ChannelPool(settings=patient())
    call = worker_pb2_grpc.WorkerServiceStub(pool.channel(f"127.0.0.1:{port}")).WatchKv(worker_pb2.WatchKvRequest())
    await call.read()
    process.kill()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert type(from_rpc_error(caught.value, has_begun=True)) is LostError
    await process.wait()
    await pool.aclose()


async def test_the_pool_is_bounded_and_keeps_its_channels() -> None:
    """The pool has one channel per address and refuses addresses beyond its bound. Dropping a channel makes room."""
    pool = ChannelPool(settings=RpcSettings(channels_max=2))
    first = pool.channel("127.0.0.1:1")
    assert pool.channel("127.0.0.1:1") is first
    pool.channel("127.0.0.1:2")
    with pytest.raises(OverloadedError):
        pool.channel("127.0.0.1:3")
    await pool.drop("127.0.0.1:1")
    await pool.drop("127.0.0.1:1")
    pool.channel("127.0.0.1:3")
    assert len(pool) == 2
    await pool.aclose()
    assert len(pool) == 0


class ManualClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("the pool must not sleep")


async def test_channels_to_lost_peers_are_closed() -> None:
    """With 50 short-lived workers the pool neither grows nor refuses the next one. A connected channel is kept."""
    clock = ManualClock()
    pool = ChannelPool(settings=patient(channels_max=4), clock=clock)
    kept = make_server(RpcSettings(grace_s=0))
    await kept.start()
    connected = pool.channel(kept.address)
    await worker_pb2_grpc.WorkerServiceStub(connected).Wake(worker_pb2.WakeRequest())
    for _ in range(50):
        server = make_server(RpcSettings(grace_s=0))
        await server.start()
        channel = pool.channel(server.address)
        await worker_pb2_grpc.WorkerServiceStub(channel).Wake(worker_pb2.WakeRequest())
        await server.aclose()
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
        clock.now_s += UNUSED_S
        assert len(pool) <= 3
    assert pool.channel(kept.address) is connected
    await pool.aclose()
    await kept.aclose()


async def test_a_recently_used_channel_is_kept() -> None:
    """A channel that is not connected yet may have a call that is connecting."""
    clock = ManualClock()
    pool = ChannelPool(settings=RpcSettings(), clock=clock)
    first = pool.channel("127.0.0.1:1")
    pool.channel("127.0.0.1:2")
    clock.now_s += UNUSED_S - 1
    assert pool.channel("127.0.0.1:1") is first
    clock.now_s += UNUSED_S - 1
    pool.channel("127.0.0.1:3")
    assert pool.channel("127.0.0.1:1") is first and len(pool) == 2
    await pool.aclose()


async def test_a_call_waits_for_a_server_that_starts_late() -> None:
    """A call with `wait_for_ready` succeeds soon after the server has started."""
    with closed_port() as port:
        settings = patient(port=port, grace_s=0)
        server, pool = (
            make_server(settings),
            ChannelPool(settings=settings, interceptors=channel_interceptors(Telemetry.create("frontend"))),
        )
        stub = worker_pb2_grpc.WorkerServiceStub(pool.channel(f"127.0.0.1:{port}"))
        waiting = stub.Wake(worker_pb2.WakeRequest(), wait_for_ready=True, timeout=PATIENCE_S)
        await asyncio.sleep(0.5)
        await server.start()
        async with asyncio.timeout(PATIENCE_S):
            await waiting
        await pool.aclose()
        await server.aclose()


async def test_a_slow_handshake_is_not_a_failure() -> None:
    """A busy server that needs half a second for its first bytes does not count as unreachable."""
    assert RpcSettings().connect_timeout_s > 0.5
    settings = patient(grace_s=0)
    server, pool = (
        make_server(settings),
        ChannelPool(settings=settings, interceptors=channel_interceptors(Telemetry.create("frontend"))),
    )
    async with aclosing(server), aclosing(pool):
        await server.start()
        async with aclosing(TcpProxy(server.port)) as proxy:
            await proxy.start()
            proxy.hang()
            asyncio.get_running_loop().call_later(0.5, proxy.flow)
            stub = worker_pb2_grpc.WorkerServiceStub(pool.channel(proxy.address))
            await stub.Wake(worker_pb2.WakeRequest(), timeout=PATIENCE_S)


def test_tls_settings_go_together() -> None:
    """A certificate without its key is an error when the settings are loaded."""
    with pytest.raises(ValueError, match="together"):
        PublicRpcSettings(tls_certificate_file="a.pem")
