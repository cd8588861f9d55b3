"""A whole router on loopback: real gRPC, the embedded registry, and workers that send what the test specifies."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.clock import SystemClock
from kvmesh.core import KvRemoved, KvStored, PerformanceProfile, Report, ReportKind
from kvmesh.core.planning import PlacementBounds
from kvmesh.discovery.base import ROUTER, Registration
from kvmesh.discovery.consul import ConsulRegistry
from kvmesh.discovery.embedded import EmbeddedAgent
from kvmesh.discovery.settings import AgentSettings, DiscoverySettings
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError, UnavailableError, UnsupportedError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.router.client import GrpcRouterClient
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.router.ranking import rank
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.status import from_rpc_error
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.telemetry import Telemetry
from services.router.core import RouterCore
from services.router.core_settings import CoreSettings
from services.router.metrics import RouterMetrics
from services.router.servicer import BOUNDED_MODELS_MAX, SERVICE_NAME, RouterServicer
from services.router.serving import membership
from services.router.serving.maintenance import Maintenance
from services.router.serving.membership import FleetMembership
from tests.integration.workers import ToldWorker
from tests.patience import PATIENCE_S
from tests.servers import free_ports
from tests.unit.router_fleets import ask


async def eventually(is_so: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """Waits until other tasks have made the condition true."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.005)


class ForwardClock(SystemClock):
    """The system's clock, which tests set forward."""

    def __init__(self) -> None:
        self.forward_s = 0.0

    def now(self) -> float:
        return super().now() + self.forward_s


class Router:
    """The parts of `services.router.__main__`, in this process."""

    def __init__(self, name: str, registry: ConsulRegistry, channels: ChannelPool, **core) -> None:
        clock = self.clock = ForwardClock()
        telemetry = Telemetry.create("router", registry=CollectorRegistry())
        self.name = name
        self.registry = registry
        settings = CoreSettings(reservation_grace_s=0.2, **core)
        self.core = RouterCore(settings, router_id=name, generator=Random(1))
        metrics = RouterMetrics(telemetry.instruments, self.core)
        self.metrics = telemetry.registry
        self.servicer = RouterServicer(self.core, metrics, clock)
        self.membership = FleetMembership(
            registry,
            GrpcWorkerClient(channels),
            self.core.fleet,
            clock=clock,
            generator=Random(1),
        )
        self.upkeep = Maintenance(self.core, metrics, clock)
        self.server = RpcServer(
            RpcSettings(grace_s=0),
            service_names=[SERVICE_NAME],
            add_services=self.servicer.add_to,
            interceptors=server_interceptors(telemetry),
        )

    async def start(self, tasks: AsyncExitStack) -> None:
        await self.server.start()
        await self.server.set_serving(True)
        for part in (self.membership, self.upkeep, self.servicer.dispatcher):
            task = asyncio.create_task(part.run())
            tasks.push_async_callback(end, task)
        await self.registry.register(
            Registration(
                service=ROUTER,
                instance_id=self.name,
                host="127.0.0.1",
                port=self.server.port,
                check_interval_s=0.5,
                ttl_s=60,
            )
        )
        await self.registry.heartbeat(self.name)
        tasks.push_async_callback(self.server.aclose)

    def takes(self) -> set[str]:
        return {name for name, worker in self.core.fleet.workers.items() if not worker.excluded_by}


async def end(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.wait([task])


class Mesh:
    """A registry to which tests add routers, workers and links."""

    def __init__(self, registry: ConsulRegistry, channels: ChannelPool, stack: AsyncExitStack) -> None:
        self.registry = registry
        self.channels = channels
        self.stack = stack

    async def router(self, name: str = "router-1", **core) -> Router:
        router = Router(name, self.registry, self.channels, **core)
        await router.start(self.stack)
        return router

    async def link(self, **settings) -> GrpcRouterLink:
        link = GrpcRouterLink(
            self.registry,
            self.channels,
            frontend_id="frontend-1",
            clock=SystemClock(),
            generator=Random(1),
            settings=RouterLinkSettings(**settings),
        )
        task = asyncio.create_task(link.run())
        self.stack.push_async_callback(end, task)
        return link

    async def worker(self, name: str, role: str, **options) -> ToldWorker:
        worker = ToldWorker(name, role, **options)
        # A worker that starts again needs its port, which no outgoing connection may take meanwhile.
        await worker.start(self.registry, port=free_ports(1)[0])
        self.stack.push_async_callback(worker.die)
        return worker


@asynccontextmanager
async def running_mesh() -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        agent = EmbeddedAgent(AgentSettings(port=0))
        await agent.start()
        stack.push_async_callback(agent.aclose)
        registry = ConsulRegistry(DiscoverySettings(address=agent.address))
        stack.push_async_callback(registry.aclose)
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        yield Mesh(registry, channels, stack)


async def test_a_request_follows_its_blocks():
    """KV events of live workers decide the next placement, and Explain shows the reason."""
    async with running_mesh() as mesh:
        p1 = await mesh.worker("p1", "prefill")
        await mesh.worker("p2", "prefill")
        await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"p1", "p2", "d1"})
        p1.tell(KvStored(block_hashes=[1, 2, 3]))
        await eventually(lambda: router.core.fleet.workers["p1"].feed.blocks == 3)
        link = await mesh.link()
        placed = await link.place(ask("r1", [1, 2, 3, 4]), timeout_s=PATIENCE_S)
        assert placed.placement.prefill.worker_id == "p1"
        assert placed.placement.decode.worker_id == "d1"
        assert placed.placement.cached_tokens == 48
        assert placed.placement.reasons == ("kv_overlap",)
        link.report_nowait(placed.ask_id, Report(kind=ReportKind.PREFILLED, elapsed_s=0.1, cached_tokens=48))
        link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.2, output_tokens=3))
        await eventually(lambda: len(router.core.book) == 0)

        client = GrpcRouterClient(mesh.channels, router.server.address)
        explanation = await client.explain("r1", timeout_s=PATIENCE_S)
        assert [candidate.prefill.worker_id for candidate in explanation.candidates] == ["p1", "p2"]
        assert dict(explanation.candidates[0].terms)["prefill"] == pytest.approx(0.004 + 16 * 0.00004)
        assert [report.kind for report in explanation.reports] == [ReportKind.PREFILLED, ReportKind.FINISHED]
        with pytest.raises(NotFoundError):
            await client.explain("never", timeout_s=PATIENCE_S)
        views = {view.worker.worker_id: view for view in await client.list_workers(timeout_s=PATIENCE_S)}
        assert (views["p1"].trust, views["p1"].index_blocks, views["p1"].excluded_by) == ("exact", 3, "")
        assert router.metrics.get_sample_value("kvmesh_router_placed_requests_total", {"reason": "kv_overlap"}) == 1


async def test_a_dead_worker_is_excluded_and_returns():
    """The broken stream excludes the worker before the registry notices its death. A new process at the same address starts with an empty
    index."""
    async with running_mesh() as mesh:
        p1 = await mesh.worker("p1", "prefill")
        await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"p1", "d1"})
        p1.tell(KvStored(block_hashes=[1, 2]))
        await eventually(lambda: router.core.fleet.workers["p1"].feed.blocks == 2)
        await p1.die()
        # The registry's check may find the dead worker at the same moment.
        await eventually(lambda: router.core.fleet.workers["p1"].stream_fault == "unreachable")
        assert router.takes() == {"d1"}
        again = ToldWorker("p1", "prefill", epoch=2)
        await again.start(mesh.registry, port=p1.port)
        mesh.stack.push_async_callback(again.die)
        again.tell(KvStored(block_hashes=[7]))
        await eventually(lambda: router.takes() == {"p1", "d1"} and router.core.fleet.workers["p1"].feed.blocks == 1)


async def test_a_broken_connection_resumes_where_it_stopped():
    """After a reconnect the same process sends only the missed events, and the index is exact without a snapshot."""
    async with running_mesh() as mesh:
        d1 = await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"d1"})
        d1.tell(KvStored(block_hashes=[1, 2, 3]))
        feed = router.core.fleet.workers["d1"].feed
        await eventually(lambda: feed.blocks == 3)
        await d1.die()
        await eventually(lambda: router.takes() == set())
        d1.tell(KvRemoved(block_hashes=[3]))
        await d1.start(mesh.registry, port=d1.port)
        await eventually(lambda: router.takes() == {"d1"} and feed.blocks == 2)
        assert router.core.fleet.workers["d1"].feed is feed
        assert (feed.gaps, feed.trust) == (0, "exact")


async def test_a_silent_worker_is_excluded_until_it_sends_again():
    """A worker that hangs keeps its connections open. Its missing load records exclude it."""
    async with running_mesh() as mesh:
        d1 = await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"d1"})
        d1.is_silent = True
        await eventually(lambda: router.core.fleet.workers["d1"].excluded_by == "silent")
        await asyncio.sleep(0.3)
        assert router.core.fleet.workers["d1"].excluded_by == "silent"
        d1.is_silent = False
        await eventually(lambda: router.takes() == {"d1"})


async def test_a_router_that_was_suspended_excludes_no_worker(caplog, monkeypatch):
    """After a pause the router reads the load records that arrived meanwhile, before it checks for silent workers."""
    monkeypatch.setattr(membership, "SILENCE_S", 1.0)
    monkeypatch.setattr(membership, "READING_S", PATIENCE_S)
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"d1"})
        time.sleep(1.5)  # noqa: ASYNC251 - nothing else may run meanwhile.
        for _ in range(50):
            assert router.takes() == {"d1"}
            await asyncio.sleep(0.004)
        assert "worker_streams_broken" not in caplog.text


async def test_a_drain_mark_excludes_until_it_is_removed():
    """The registry's mark counts although both streams work."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"d1"})
        await mesh.registry.set_draining("d1", True)
        await eventually(lambda: router.core.fleet.workers["d1"].excluded_by == "draining")
        link = await mesh.link()
        with pytest.raises(UnavailableError) as refusal:
            await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        assert refusal.value.retry_after_s == 1
        await mesh.registry.set_draining("d1", False)
        await eventually(lambda: router.takes() == {"d1"})
        await mesh.registry.deregister("d1")
        await eventually(lambda: "d1" not in router.core.fleet.workers)


async def test_asks_move_to_another_router():
    """When a router dies, the link sends unanswered asks to the other router."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        first = await mesh.router("router-1")
        second = await mesh.router("router-2")
        await eventually(lambda: first.takes() == second.takes() == {"d1"})
        link = await mesh.link()
        await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        used, other = (first, second) if link.router_ids[0] == "router-1" else (second, first)
        asks = asyncio.gather(*(link.place(ask(f"m{i}", [1]), timeout_s=PATIENCE_S) for i in range(20)))
        await used.server.aclose()
        placed = await asks
        assert len(placed) == 20
        await link.place(ask("r2", [1]), timeout_s=PATIENCE_S)
        await eventually(lambda: link.router_ids[:1] == (other.name,))
        # Reservations of the dead router end after the grace period, because the frontend does not return to it.
        await eventually(lambda: len(used.core.book) == 0)


async def test_ending_streams_for_a_drain_loses_no_ask():
    """A stopping router ends its streams, and the frontend switches to another router immediately."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        first = await mesh.router("router-1")
        second = await mesh.router("router-2")
        await eventually(lambda: first.takes() == second.takes() == {"d1"})
        link = await mesh.link()
        await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        used = first if link.router_ids[0] == "router-1" else second
        await mesh.registry.set_draining(used.name, True)
        used.servicer.end_streams()
        placed = await asyncio.gather(*(link.place(ask(f"m{i}", [1]), timeout_s=PATIENCE_S) for i in range(20)))
        assert len({p.ask_id for p in placed}) == 20
        await eventually(lambda: link.router_ids and link.router_ids[0] != used.name)


async def test_no_router_and_cancel():
    """Without a router an ask fails at its timeout. A cancelled ask leaves no reservation."""
    async with running_mesh() as mesh:
        link = await mesh.link(answer_timeout_s=0.1)
        with pytest.raises(UnavailableError) as refusal:
            await link.place(ask("r1", [1]), timeout_s=0.3)
        assert refusal.value.reason == "no_router"
        await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"d1"} and link.router_ids)
        going = asyncio.create_task(link.place(ask("r2", [1]), timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.wait([going])
        placed = await link.place(ask("r3", [1]), timeout_s=PATIENCE_S)
        link.report_nowait(placed.ask_id, Report(kind=ReportKind.CANCELLED, elapsed_s=0.0))
        await eventually(lambda: len(router.core.book) == 0)


async def test_bad_messages_give_typed_errors():
    """A stream without a hello, an ask without a model, and SyncPeers get typed errors. Valid asks on the stream still work."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        router = await mesh.router()
        await eventually(lambda: router.takes() == {"d1"})
        stub = RouterServiceStub(mesh.channels.channel(router.server.address))
        call = stub.Route()
        for hello in (None, pb.Hello(frontend_id="f")):
            call = stub.Route()
            await call.write(pb.RouteRequest(hello=hello, asks=[pb.Ask(ask_id=1)]))
            with pytest.raises(Exception) as raised:
                await call.read()
            error = from_rpc_error(raised.value)
            assert isinstance(error, InvalidRequestError)
            assert error.field == "hello"

        call = stub.Route()
        await call.write(pb.RouteRequest(hello=pb.Hello(frontend_id="f")))
        await call.write(pb.RouteRequest(asks=[pb.Ask(ask_id=1, request_id="a", prompt_tokens=3)]))
        assert (await call.read()).refusals[0].error.field == "ask.model"
        await call.write(pb.RouteRequest(asks=[pb.Ask(ask_id=2, request_id="a", prompt_tokens=3, model="demo")]))
        assert (await call.read()).placements[0].decode.worker_id == "d1"
        call.cancel()

        peers = stub.SyncPeers()
        with pytest.raises(Exception) as raised:
            await peers.read()
        assert isinstance(from_rpc_error(raised.value), UnsupportedError)


async def test_the_bounds_of_placements_are_set_and_checked():
    """Each call replaces both bounds. Invalid values and planners that are not the leader change nothing, and empty bounds remove them."""
    async with running_mesh() as mesh:
        router = await mesh.router()
        client = GrpcRouterClient(mesh.channels, router.server.address)
        bounds, placer = PlacementBounds(deflect_tokens=512, ttft_s=1.5), router.core.placer
        await client.set_bounds("demo", bounds, fencing_token=3, timeout_s=PATIENCE_S)
        assert placer.bounds_of("demo") == bounds
        for model, wrong, field in (
            ("demo", PlacementBounds(ttft_s=-1.0), "ttft_s"),
            ("demo", PlacementBounds(ttft_s=float("nan")), "ttft_s"),
            ("demo", PlacementBounds(ttft_s=1e6), "ttft_s"),
            ("", PlacementBounds(), "model"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                await client.set_bounds(model, wrong, fencing_token=3, timeout_s=PATIENCE_S)
            assert refused.value.field == field
        with pytest.raises(UnsupportedError) as late:
            await client.set_bounds("demo", PlacementBounds(), fencing_token=2, timeout_s=PATIENCE_S)
        assert late.value.reason == "not_leader"
        assert placer.bounds == {"demo": bounds}
        await client.set_bounds("demo", PlacementBounds(), fencing_token=3, timeout_s=PATIENCE_S)
        assert not placer.bounds
        for number in range(BOUNDED_MODELS_MAX):
            await client.set_bounds(f"model-{number}", bounds, fencing_token=3, timeout_s=PATIENCE_S)
        with pytest.raises(OverloadedError) as full:
            await client.set_bounds("one more", bounds, fencing_token=3, timeout_s=PATIENCE_S)
        assert full.value.reason == "bounds_full"
        await client.set_bounds("model-0", PlacementBounds(ttft_s=2.0), fencing_token=3, timeout_s=PATIENCE_S)
        assert placer.bounds_of("model-0").ttft_s == 2.0


async def test_late_requests_are_placed_when_the_worker_has_spare_time():
    """With the frontend's link: newer requests that meet the target overtake late ones, and no request is refused."""
    async with running_mesh() as mesh:
        profile = PerformanceProfile(
            prefill_base_s=0.0, prefill_s_per_token=0.001, decode_step_base_s=0.001, decode_s_per_request=0.0001
        )
        await mesh.worker("p1", "prefill", profile=profile)
        await mesh.worker("d1", "decode", profile=profile)
        router = await mesh.router(prefill_congested_s=1e9)
        await eventually(lambda: router.takes() == {"p1", "d1"})
        link = await mesh.link()
        router.core.placer.set_bounds("demo", PlacementBounds(ttft_s=10.0))
        first = await link.place(ask("first", tokens=8000), timeout_s=PATIENCE_S)
        late = [asyncio.create_task(link.place(ask(f"r{i}", tokens=2000), timeout_s=PATIENCE_S)) for i in range(3)]
        await eventually(lambda: router.core.queue.requests == 3)
        await link.place(ask("short", tokens=500), timeout_s=PATIENCE_S)
        assert not any(task.done() for task in late)
        link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        placed = await asyncio.gather(*late)
        assert {each.placement.reasons[-1] for each in placed} == {"late"}
        assert not router.core.queue.requests


NAMES = ("router-4", "router-1", "router-5", "router-3", "router-8", "router-6")
"""The link prefers each of the last four to all names before it."""


async def test_a_router_that_joins_gets_its_streams(caplog: pytest.LogCaptureFixture):
    """Real routers join one after the other under load. The link ends at the two that it prefers, and no request fails or is placed twice."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        routers = {name: await mesh.router(name) for name in NAMES[:2]}
        # The limits of a silent router and of a stream that is left would end streams on a busy machine.
        link = await mesh.link(move_pause_s=0.05, answer_timeout_s=PATIENCE_S, leave_s=PATIENCE_S)
        await eventually(lambda: len(link.router_ids) == 2 and all(r.takes() == {"d1"} for r in routers.values()))
        done = 0

        async def request(number: int) -> None:
            nonlocal done
            placed = await link.place(ask(f"r{number}", [1], timeout_s=PATIENCE_S), timeout_s=PATIENCE_S)
            await asyncio.sleep(0.05)
            link.report_nowait(placed.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.05))
            done += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(600):
                tasks.create_task(request(number))
                await asyncio.sleep(0.005)
                if number in (100, 200, 300, 400):
                    name = NAMES[len(routers)]
                    routers[name] = await mesh.router(name)
                    await eventually(lambda: all(r.takes() == {"d1"} for r in routers.values()))
        wanted = set(sorted(routers, key=lambda name: rank("frontend-1", name))[-2:])
        assert not wanted & set(NAMES[:2])  # Both streams had to move.
        await eventually(lambda: set(link.router_ids) == wanted)
        assert done == 600 and "router_stream_broken" not in caplog.text
        await eventually(lambda: not any(len(router.core.book) for router in routers.values()))
        counted = [r.metrics.get_sample_value("kvmesh_router_prompt_tokens_total") for r in routers.values()]
        assert sum(counted) == 600 * 16
