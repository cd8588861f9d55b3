"""The frontend's link to routers, against scripted routers: which router gets asks and reports, and in how many messages."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1 import router_pb2_grpc
from kvmesh.clock import SystemClock
from kvmesh.core import Placement, Report, ReportKind, WorkerRef
from kvmesh.discovery.base import ROUTER, Health, Instance, View
from kvmesh.errors import LostError
from kvmesh.rpc.codec.router import read_route_request
from kvmesh.rpc.router.link import GrpcRouterLink
from kvmesh.rpc.router.ranking import preferred_routers
from kvmesh.rpc.router.settings import RouterLinkSettings
from kvmesh.rpc.router.stream import HASHES_MAX
from kvmesh.simulation.rpc import MemoryNetwork
from tests.messages import to_placement
from tests.unit.router_fleets import ask
from tests.virtual_loop import run_virtual

LATENCY_S = 0.001
BUFFER_MESSAGES = 16
"""What the transport takes while the router does not read."""
WORKER = WorkerRef(worker_id="d1", address="d1:1", epoch=1)


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """Records the messages that it receives, and answers asks while `answers` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = True
        self.asked: list[str] = []
        self.messages = 0
        self.reports: list[pb.Report] = []
        self.reports_per_message: list[int] = []
        self.asks_per_message: list[int] = []

    async def Route(self, request_iterator, context):
        await context.send_initial_metadata(())
        async for message in request_iterator:
            self.messages += 1
            if message.HasField("hello"):
                continue
            reports, asks = read_route_request(message)
            if reports:
                self.reports_per_message.append(len(reports))
                self.reports += reports
            if asks:
                self.asks_per_message.append(len(asks))
                self.asked += [ask.request_id for ask in asks]
            placements = [self.placement(ask.ask_id) for ask in asks if self.answers]
            if placements:
                yield pb.RouteResponse(placements=placements)

    def placement(self, ask_id: int) -> pb.Placement:
        return to_placement(ask_id, Placement(reservation_id=f"{self.name}-{ask_id}", decode=WORKER))

    def received(self) -> list[tuple[int, str, str]]:
        return [(each.ask_id, pb.ReportKind.Name(each.kind)[12:], each.reservation_id) for each in self.reports]


class RouterRegistry:
    """A registry of healthy routers. `list` changes the list."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.changed = asyncio.Event()

    def list(self, *names: str) -> None:
        self.names = names
        self.changed.set()

    async def watch(self, service: str) -> AsyncIterator[View]:
        assert service == ROUTER
        while True:
            yield View(service=service, index=1, instances=[listed(name) for name in self.names])
            await self.changed.wait()
            self.changed.clear()


def listed(name: str, health: Health = Health.PASSING) -> Instance:
    return Instance(
        service=ROUTER, instance_id=name, host=name, port=1, meta={}, tags=(), health=health, is_draining=False
    )


class Stage:
    def __init__(self, *, frontend_id: str = "f", **settings) -> None:
        self.registry = RouterRegistry("a", "b")
        self.network = MemoryNetwork(latency_s=lambda: LATENCY_S, buffer_messages=BUFFER_MESSAGES)
        self.routers = {name: FakeRouter(name) for name in "abcd"}
        self.link = GrpcRouterLink(
            self.registry,
            self.network.pool(),
            frontend_id=frontend_id,
            clock=SystemClock(),
            generator=Random(1),
            settings=RouterLinkSettings(**settings),
        )

    async def __aenter__(self) -> "Stage":
        for name in self.routers:
            await self.serve(name)
        self.task = asyncio.create_task(self.link.run())
        await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.link.aclose()
        await asyncio.wait([self.task])

    async def serve(self, name: str) -> None:
        server = self.network.server(f"{name}:1")
        router_pb2_grpc.add_RouterServiceServicer_to_server(self.routers[name], server)
        await server.start()

    @property
    def used(self) -> dict[str, FakeRouter]:
        return {name: self.routers[name] for name in self.registry.names}

    async def place(self, name: str, **options) -> int:
        return (await self.link.place(ask(name, [1], **options), timeout_s=10)).ask_id

    def placed_by(self, ask_id: int) -> str:
        """Returns the name of the router that placed the ask."""
        return self.link._in_flight[ask_id].reservation_id.partition("-")[0]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_asks_are_spread_and_sessions_stick_to_a_router() -> None:
    """Asks alternate between both routers. Asks of one session go to the same router from every frontend."""

    async def story() -> None:
        async with Stage() as stage, Stage() as other:
            for number in range(10):
                await stage.place(f"r{number}")
            assert {len(router.asked) for router in stage.used.values()} == {5}
            for session in map(str, range(20)):
                places = set()
                for each in (stage, other, stage):
                    places.add(each.placed_by(await each.place("s", session_id=session)))
                assert len(places) == 1
            assert all(len(router.asked) > 10 for router in stage.used.values())

    run_virtual(story())


def test_reports_are_batched_within_the_delay() -> None:
    """Reports of ten requests become one message per router, and keep the times of their events. A failure is sent at once."""

    async def story() -> None:
        async with Stage() as stage:
            asks = [await stage.place(f"r{number}") for number in range(10)]
            before = {name: router.messages for name, router in stage.used.items()}
            for number, ask_id in enumerate(asks):
                stage.link.report_nowait(ask_id, Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.5 + number))
                await asyncio.sleep(0.0005)
            await asyncio.sleep(0.02)
            for name, router in stage.used.items():
                assert router.reports_per_message == [5]
                assert router.messages == before[name] + 1
                assert [each.elapsed.seconds for each in router.reports] == [
                    number for number, ask_id in enumerate(asks) if stage.placed_by(ask_id) == name
                ]
            placed_by = stage.routers[stage.placed_by(asks[0])]
            stage.link.report_nowait(asks[2], Report(kind=ReportKind.FINISHED, elapsed_s=1.0))
            stage.link.report_nowait(asks[0], Report(kind=ReportKind.FAILED, elapsed_s=1.0, error=LostError("gone")))
            await asyncio.sleep(2 * LATENCY_S)
            assert placed_by.reports_per_message == [5, 2]

    run_virtual(story())


def test_an_ask_sends_pending_reports_first() -> None:
    """Pending reports are sent before the ask without further delay, because they may free capacity for it."""

    async def story() -> None:
        async with Stage(routers=1) as stage:
            first = await stage.place("r1")
            stage.link.report_nowait(first, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
            await stage.place("r2")
            [router] = [router for router in stage.routers.values() if router.asked]
            assert router.received() == [(first, "FINISHED", "")]

    run_virtual(story())


def test_asks_are_batched_behind_unanswered_ones() -> None:
    """The first `asks_ahead` asks are sent at once. Later ones share a message, which is sent with the next answer or after `ask_delay_s`."""

    async def story() -> None:
        async with Stage(routers=1, asks_ahead=2, ask_delay_s=0.01) as stage:
            tasks = []
            for number in range(8):
                tasks.append(asyncio.create_task(stage.place(f"r{number}")))
                await asyncio.sleep(LATENCY_S / 4)
            await asyncio.gather(*tasks)
            [router] = [router for router in stage.routers.values() if router.asked]
            assert router.asks_per_message[:2] == [1, 1] and max(router.asks_per_message) > 2
            assert router.asked == [f"r{number}" for number in range(8)]
            router.answers, router.asks_per_message = False, []
            tasks = [asyncio.create_task(stage.place(f"s{number}")) for number in range(2)]
            await asyncio.sleep(LATENCY_S)
            tasks += [asyncio.create_task(stage.place(f"t{number}")) for number in range(3)]
            await asyncio.sleep(0.009)
            assert router.asks_per_message == [2]
            await asyncio.sleep(0.003)
            assert router.asks_per_message == [2, 3]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    run_virtual(story())


def test_a_message_is_bounded() -> None:
    """A message holds at most `asks_max` asks, and at most half a megabyte of hashes if it has more than one ask."""

    async def story() -> None:
        async with Stage(routers=1, asks_max=16) as stage:
            await asyncio.gather(*(stage.place(f"r{number}") for number in range(40)))
            [router] = [router for router in stage.routers.values() if router.asked]
            assert router.asks_per_message == [16, 16, 8]
            router.asks_per_message.clear()
            long = [ask(f"l{n}", list(range(1, HASHES_MAX // 2 + 2))) for n in range(3)]
            await asyncio.gather(*(stage.link.place(each, timeout_s=10) for each in long))
            assert router.asks_per_message == [1, 1, 1]

    run_virtual(story())


def test_a_broken_stream_moves_asks_and_requests_in_flight() -> None:
    """When a stream breaks, the other router gets the unanswered asks, and reports on each request in flight with its reservation id."""

    async def story() -> None:
        async with Stage() as stage:
            asks = [await stage.place(f"r{number}") for number in range(6)]
            a, b = stage.routers["a"], stage.routers["b"]
            of_a = [ask_id for ask_id in asks if stage.placed_by(ask_id) == "a"]
            stage.link.report_nowait(of_a[1], Report(kind=ReportKind.PREFILLED, elapsed_s=0.25))
            stage.link.report_nowait(of_a[2], Report(kind=ReportKind.FINISHED, elapsed_s=0.5))
            a.answers = False
            waiting = [asyncio.create_task(stage.place(f"w{number}")) for number in range(2)]
            await asyncio.sleep(0.005)
            assert not all(task.done() for task in waiting)
            stage.network.kill("a:1")
            began = now()
            await asyncio.gather(*waiting)
            assert now() - began < 5 * LATENCY_S
            stage.link.report_nowait(of_a[0], Report(kind=ReportKind.FIRST_TOKEN, elapsed_s=0.75))
            await asyncio.sleep(0.05)
            assert [each for each in b.received() if each[0] in of_a] == [
                (of_a[0], "PROGRESS", f"a-{of_a[0]}"),
                (of_a[1], "PREFILLED", f"a-{of_a[1]}"),
                (of_a[0], "FIRST_TOKEN", f"a-{of_a[0]}"),
            ]
            assert [each.elapsed.nanos for each in b.reports if each.kind == pb.REPORT_KIND_PREFILLED] == [250_000_000]
            # Reports that were written to the router before it died may be lost. No router adopts that request, so it ends after the grace time.
            assert (of_a[2], "FINISHED", "") in a.received()

    run_virtual(story())


def test_unsent_reports_move_to_the_other_router() -> None:
    """A report that is still pending when the stream breaks is sent to the other router."""

    async def story() -> None:
        async with Stage(report_delay_s=1.0) as stage:
            asks = [await stage.place(f"r{number}") for number in range(2)]
            [of_a] = [ask_id for ask_id in asks if stage.placed_by(ask_id) == "a"]
            stage.link.report_nowait(of_a, Report(kind=ReportKind.FINISHED, elapsed_s=0.5))
            stage.network.kill("a:1")
            await asyncio.sleep(1.1)
            assert (of_a, "FINISHED") in [each[:2] for each in stage.routers["b"].received()]

    run_virtual(story())


def test_reports_of_an_interrupted_write_move_to_the_other_router() -> None:
    """If the stream breaks while a message waits for the transport, the other router gets the reports of that message, too."""

    async def story() -> None:
        async with Stage(report_delay_s=0.0) as stage:
            asks = [await stage.place(f"r{number}") for number in range(2 * BUFFER_MESSAGES + 6)]
            of_a = [ask_id for ask_id in asks if stage.placed_by(ask_id) == "a"]
            stage.network.partition("a:1")
            for ask_id in of_a:
                stage.link.report_nowait(ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.5))
                await asyncio.sleep(LATENCY_S)
            stage.network.kill("a:1")
            await asyncio.sleep(5 * LATENCY_S)
            received = [each[:2] for each in stage.routers["b"].received()]
            assert received == [(ask_id, "FINISHED") for ask_id in of_a[BUFFER_MESSAGES:]]

    run_virtual(story())


def test_a_silent_router_is_abandoned_after_the_answer_timeout() -> None:
    """If a router does not respond and its connection does not break, the other router answers the ask after `answer_timeout_s`."""

    async def story() -> None:
        async with Stage() as stage:
            stage.network.partition("a:1")
            began = now()
            await asyncio.gather(*(stage.place(f"r{number}") for number in range(4)))
            assert 2.0 < now() - began < 2.1
            assert len(stage.routers["b"].asked) == 4

    run_virtual(story())


def test_an_unreachable_router_gets_no_more_asks() -> None:
    """Only the asks that were pending at a router when it became unreachable wait for the timeout. The router is used again after it
    recovers."""

    async def story() -> None:
        async with Stage(answer_timeout_s=0.5) as stage:
            stage.network.partition("a:1")
            await asyncio.gather(*(stage.place(f"s{number}") for number in range(4)))
            for number in range(40):
                began = now()
                await stage.place(f"t{number}")
                assert now() - began < 0.01
                await asyncio.sleep(0.05)
            stage.network.heal("a:1")
            await asyncio.sleep(1.0)
            stage.routers["a"].asked.clear()
            await asyncio.gather(*(stage.place(f"u{number}") for number in range(4)))
            assert len(stage.routers["a"].asked) == 2

    run_virtual(story())


def test_without_routers_reports_wait_for_the_next_one() -> None:
    """If all routers are lost, the first one that returns gets reports on the requests that are in flight and on those that finished
    meanwhile."""

    async def story() -> None:
        async with Stage() as stage:
            asks = [await stage.place(f"r{number}") for number in range(2)]
            for name in stage.routers:
                stage.network.kill(f"{name}:1")
            await asyncio.sleep(0.1)
            assert not stage.link.router_ids
            stage.link.report_nowait(asks[0], Report(kind=ReportKind.FINISHED, elapsed_s=0.5))
            await stage.serve("b")
            await asyncio.sleep(2.0)
            received = [each[:2] for each in stage.routers["b"].received()]
            assert (asks[0], "FINISHED") in received and (asks[1], "PROGRESS") in received

    run_virtual(story())


def test_a_cancelled_ask_is_withdrawn() -> None:
    """An ask that was not sent yet is dropped. For a sent ask, or a placement on its way, the router gets a CANCELLED report."""

    async def story() -> None:
        async with Stage(routers=1) as stage:
            [stream] = stage.link._streams.streams.values()
            stream.send_ask(99, ask("never"))
            stream.withdraw(99)
            for delay_s in (0.0005, 1.5 * LATENCY_S):
                going = asyncio.create_task(stage.place("r"))
                await asyncio.sleep(delay_s)
                going.cancel()
                await asyncio.wait([going])
                await asyncio.sleep(0.05)
            [router] = [router for router in stage.routers.values() if router.messages]
            assert router.asked == ["r", "r"]
            assert [kind for _, kind, _ in router.received()] == ["CANCELLED", "CANCELLED"]
            assert not stage.link._in_flight and not stage.link._pending

    run_virtual(story())


# Which routers


def preferred(frontend_id: str, names: str, count: int = 2) -> set[str]:
    return {each.instance_id for each in preferred_routers(frontend_id, map(listed, names), count)}


def test_a_new_router_gets_a_missing_stream_at_once() -> None:
    """A frontend with fewer streams than it may have connects to a new router without waiting for a stream to break."""

    async def story() -> None:
        async with Stage(routers=3) as stage:
            assert set(stage.link.router_ids) == {"a", "b"}
            stage.registry.list("a", "b", "c")
            await asyncio.sleep(5 * LATENCY_S)
            assert set(stage.link.router_ids) == {"a", "b", "c"}

    run_virtual(story())


def test_streams_move_to_routers_that_join(caplog: pytest.LogCaptureFixture) -> None:
    """Each frontend moves to the routers that it ranks highest, one stream at a time. No request fails, is repeated or is adopted during the
    moves."""

    async def story(frontend_id: str) -> int:
        async with Stage(frontend_id=frontend_id, move_pause_s=1.0) as stage:
            assert set(stage.link.router_ids) == {"a", "b"}
            stage.registry.list("a", "b", "c", "d")
            most, left = 2, []
            for number in range(1000):
                ask_id = await stage.place(f"r{number}")
                left.append(ask_id)
                if len(left) > 50:
                    stage.link.report_nowait(left.pop(0), Report(kind=ReportKind.FINISHED, elapsed_s=0.5))
                await asyncio.sleep(0.01)
                most = max(most, len(stage.link.router_ids))
            wanted = preferred(frontend_id, "abcd")
            assert set(stage.link.router_ids) == wanted
            assert most == (2 if wanted == {"a", "b"} else 3)
            assert "router_stream_broken" not in caplog.text
            assert sum(len(router.asked) for router in stage.routers.values()) == 1000
            for router in stage.routers.values():
                assert all(reservation_id == "" for _, _, reservation_id in router.received())
            return len(wanted - {"a", "b"})

    moves = {run_virtual(story(f"frontend-{number}")) for number in range(8)}
    assert moves == {0, 1, 2}


def test_an_old_stream_closes_after_leave_s() -> None:
    """After `leave_s` the new router adopts requests that are still in flight, and gets asks that the old router has not answered."""

    async def story() -> None:
        async with Stage(routers=1, frontend_id=PREFERS_C, move_pause_s=0.1, leave_s=0.5) as stage:
            [old] = stage.link.router_ids
            ask_id = await stage.place("r1")
            stage.routers[old].answers = False
            asking = asyncio.create_task(stage.place("r2"))
            await asyncio.sleep(0.01)
            stage.registry.list("a", "b", "c")
            await asyncio.sleep(0.3)
            assert set(stage.link.router_ids) == {old, "c"} and not asking.done()
            await stage.place("r3")
            assert stage.routers["c"].asked == ["r3"]
            await asyncio.sleep(0.6)
            assert stage.link.router_ids == ("c",)
            await asking
            assert stage.routers["c"].asked == ["r3", "r2"]
            assert (ask_id, "PROGRESS", f"{old}-{ask_id}") in stage.routers["c"].received()

    run_virtual(story())


def test_an_unreachable_preferred_router_costs_no_stream() -> None:
    """If a preferred router is listed as healthy but unreachable, the streams stay at the other routers."""

    async def story() -> None:
        async with Stage(
            frontend_id=PREFERS_C, move_pause_s=0.1, answer_timeout_s=0.5, leave_s=0.5, shun_s=1.0
        ) as stage:
            stage.network.partition("c:1")
            stage.registry.list("a", "b", "c")
            for number in range(200):
                await stage.place(f"r{number}")
                await asyncio.sleep(0.02)
                assert set(stage.link.router_ids) == {"a", "b"}
            stage.network.heal("c:1")
            await asyncio.sleep(3.0)
            assert set(stage.link.router_ids) == preferred(PREFERS_C, "abc")

    run_virtual(story())


def test_a_hanging_preferred_router_is_avoided() -> None:
    """A router that accepts streams but does not answer delays one ask. No stream moves there again for `shun_s`."""

    async def story() -> None:
        async with Stage(frontend_id=PREFERS_C, move_pause_s=0.1, leave_s=0.1, answer_timeout_s=0.5) as stage:
            stage.routers["c"].answers = False
            stage.registry.list("a", "b", "c")
            slow = 0
            for number in range(400):
                began = now()
                await stage.place(f"r{number}")
                slow += now() - began > 0.1
                await asyncio.sleep(0.1)
            assert stage.routers["c"].asked and slow == 1
            assert set(stage.link.router_ids) == {"a", "b"}
            stage.routers["c"].answers = True
            await asyncio.sleep(30)
            assert set(stage.link.router_ids) == preferred(PREFERS_C, "abc")

    run_virtual(story())


def test_frontends_are_spread_evenly_over_routers() -> None:
    """With two streams of each of 2000 frontends over five routers, each router gets 800 streams within 12.5 %."""
    counts = Counter(name for n in range(2000) for name in preferred(f"frontend-{n}", "abcde"))
    assert set(counts) == set("abcde")
    assert all(700 < count < 900 for count in counts.values())


PREFERS_C = next(name for name in map(str, range(100)) if preferred(name, "abc", 1) == {"c"})
"""The id of a frontend that prefers router c."""
