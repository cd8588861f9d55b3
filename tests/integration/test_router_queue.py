"""Asks that wait in the queue, over real gRPC: responses come in any order, reports make room, and no state is left."""

import asyncio
import time
from collections.abc import Collection
from contextlib import asynccontextmanager

import pytest

from kvmesh.api.router.v1 import router_pb2 as pb
from kvmesh.api.router.v1.router_pb2_grpc import RouterServiceStub
from kvmesh.core import Report, ReportKind
from kvmesh.errors import InvalidRequestError, OverloadedError
from kvmesh.rpc.status import from_rpc_error
from services.router.core_settings import QueueSettings
from services.router.serving import queue_dispatcher
from tests.integration.test_router_service import eventually, running_mesh
from tests.messages import to_ask, to_report
from tests.patience import PATIENCE_S
from tests.unit.router_fleets import ask


@asynccontextmanager
async def busy_mesh(*, requests_max: int = 1, **queue):
    """A mesh with one decode worker that takes `requests_max` requests at a time."""
    async with running_mesh() as mesh:
        await mesh.worker("d1", "decode")
        router = await mesh.router(requests_per_decode_max=requests_max, queue=QueueSettings(**queue))
        await eventually(lambda: router.takes() == {"d1"})
        yield mesh, router


def sample(router, name: str, **labels) -> float:
    return router.metrics.get_sample_value(f"kvmesh_router_{name}", labels) or 0.0


class RawStream:
    """A frontend's stream that sends raw messages of the contract."""

    def __init__(self, mesh, router, frontend_id: str = "f") -> None:
        self.call = RouterServiceStub(mesh.channels.channel(router.server.address)).Route()
        self.frontend_id = frontend_id
        self.queued: list[int] = []
        self.answers: list[tuple[int, str]] = []

    async def __aenter__(self) -> "RawStream":
        await self.call.write(pb.RouteRequest(hello=pb.Hello(frontend_id=self.frontend_id)))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()

    async def ask(self, number: int, **options) -> None:
        await self.call.write(
            pb.RouteRequest(asks=[to_ask(number, ask(f"{self.frontend_id}-{number}", [1], **options))])
        )

    async def report(self, *numbers: int, kind: ReportKind = ReportKind.FINISHED) -> None:
        reports = [to_report(number, Report(kind=kind, elapsed_s=0.0)) for number in numbers]
        await self.call.write(pb.RouteRequest(reports=reports))

    async def answer(self) -> tuple[int, str]:
        """Returns the number of the next response, and its decode worker or the reason of its refusal."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.answers:
                message = await self.call.read()
                self.queued.extend(message.queued_ask_ids)
                self.answers += [(each.ask_id, each.decode.worker_id) for each in message.placements]
                self.answers += [(each.ask_id, each.error.reason) for each in message.refusals]
        return self.answers.pop(0)


async def test_an_ask_waits_for_room_and_its_placement_has_the_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """A busy worker does not cause a refusal: the response comes when a report has made room, and has the time waited."""
    # Several notices per timeout of the link, because a busy machine delays them.
    monkeypatch.setattr(queue_dispatcher, "NOTICE_S", 0.1)
    async with busy_mesh() as (mesh, router):
        link = await mesh.link(answer_timeout_s=1.0)
        first = await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        caplog.clear()  # On a busy machine the link may have opened its stream at the second attempt.
        began_s = time.monotonic()
        waiting = asyncio.create_task(link.place(ask("r2", [1], timeout_s=20), timeout_s=1.0))
        await eventually(lambda: router.core.queue.requests == 1)
        await asyncio.sleep(1.5)
        # This is longer than the link would wait for a silent router, and than placing may take without a queue.
        assert not waiting.done()
        assert "router_stream_broken" not in caplog.text
        assert sample(router, "queue_requests", priority="normal") == 1
        assert sample(router, "queue_tokens", priority="normal") == 16
        link.report_nowait(first.ask_id, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        placed = await asyncio.wait_for(waiting, PATIENCE_S)
        assert placed.placement.queued_s is not None
        assert 1.0 < placed.placement.queued_s < time.monotonic() - began_s
        assert first.placement.queued_s is None
        assert router.core.queue.requests == 0
        assert sample(router, "queue_wait_seconds_count", outcome="placed") == 1
        assert sample(router, "queue_served_prompt_tokens_total", priority="normal") == 16


async def test_asks_are_placed_by_priority_and_a_batch_of_reports_makes_room():
    """One message of reports settles several requests. Waiting asks are placed by priority, then by arrival."""
    async with busy_mesh(requests_max=2) as (mesh, router), RawStream(mesh, router) as stream:
        for number in (1, 2):
            await stream.ask(number)
            assert await stream.answer() == (number, "d1")
        for number, priority in ((3, 0), (4, -5), (5, 7), (6, 7)):
            await stream.ask(number, priority=priority)
        await eventually(lambda: router.core.queue.requests == 4)
        await stream.report(1, 2)
        assert [await stream.answer() for _ in range(2)] == [(5, "d1"), (6, "d1")]
        await stream.report(5, 6)
        assert [await stream.answer() for _ in range(2)] == [(3, "d1"), (4, "d1")]
        assert set(stream.queued) == {3, 4, 5, 6}
        await stream.report(3, 4)
        await eventually(lambda: len(router.core.book) == 0)


async def test_a_cancelled_ask_leaves_the_queue():
    """A cancelled ask gets a refusal and takes no place. A link whose caller cancels also cancels its ask."""
    async with busy_mesh() as (mesh, router):
        async with RawStream(mesh, router) as stream:
            await stream.ask(1)
            await stream.answer()
            await stream.ask(2)
            await stream.ask(3)
            await eventually(lambda: router.core.queue.requests == 2)
            await stream.report(2, kind=ReportKind.CANCELLED)
            assert await stream.answer() == (2, "cancelled")
            await stream.report(1)
            assert await stream.answer() == (3, "d1")
            link = await mesh.link()
            going = asyncio.create_task(link.place(ask("r", [1], timeout_s=20), timeout_s=PATIENCE_S))
            await eventually(lambda: router.core.queue.requests == 1)
            going.cancel()
            await asyncio.wait([going])
            await eventually(lambda: router.core.queue.requests == 0)
        await eventually(lambda: len(router.core.book) == 0)


async def test_a_lost_stream_removes_its_asks():
    """The asks of a broken stream leave the queue immediately, and those of other streams stay."""
    async with busy_mesh() as (mesh, router), RawStream(mesh, router, "g") as other:
        await other.ask(1)
        await other.answer()
        async with RawStream(mesh, router) as stream:
            for number in range(1, 21):
                await stream.ask(number)
            await eventually(lambda: router.core.queue.requests == 20)
            await other.ask(2)
            await eventually(lambda: router.core.queue.requests == 21)
        await eventually(lambda: router.core.queue.requests == 1)
        await other.report(1)
        assert await other.answer() == (2, "d1")
        assert not router.servicer.dispatcher.has_queued


async def test_a_new_worker_serves_waiting_asks():
    """A worker that joins makes room without a report."""
    async with busy_mesh() as (mesh, router), RawStream(mesh, router) as stream:
        await stream.ask(1)
        assert await stream.answer() == (1, "d1")
        await stream.ask(2)
        await eventually(lambda: router.core.queue.requests == 1)
        await mesh.worker("d2", "decode")
        assert await stream.answer() == (2, "d2")


async def test_refusals_after_a_wait_have_a_reason_and_a_time_to_retry():
    """The queue's own limit and the request's deadline each have their own reason."""
    async with busy_mesh(requests_max=1, wait_s_max=0.3) as (mesh, router):
        async with RawStream(mesh, router) as stream:
            await stream.ask(1)
            await stream.answer()
            await stream.ask(2)
            assert await stream.answer() == (2, "queue_wait_over")
            await stream.ask(3, timeout_s=0.1)
            assert await stream.answer() == (3, "deadline_exceeded")
        link = await mesh.link()
        await eventually(lambda: link.router_ids and len(router.core.book) == 0)
        await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        with pytest.raises(OverloadedError) as refusal:
            await link.place(ask("r2", [1]), timeout_s=PATIENCE_S)
        assert (refusal.value.reason, refusal.value.retry_after_s) == ("queue_wait_over", 1.0)
        assert refusal.value.request_id == "r2"


async def test_a_half_closed_stream_gets_its_responses():
    """A frontend that has half-closed its stream still gets the responses that it waits for."""
    async with busy_mesh() as (mesh, router), RawStream(mesh, router, "g") as other:
        await other.ask(1)
        await other.answer()
        async with RawStream(mesh, router) as stream:
            await stream.ask(1)
            await stream.call.done_writing()
            await eventually(lambda: router.core.queue.requests == 1)
            await other.report(1)
            assert await stream.answer() == (1, "d1")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.RouteRequest(reports=[pb.Report(ask_id=1)] * 1025), "reports"),
        (pb.RouteRequest(reports=[pb.Report(kind=4)]), "reports[0].ask_id"),
        (pb.RouteRequest(reports=[pb.Report(ask_id=1)]), "report.kind"),
        (pb.RouteRequest(), "asks"),
    ],
)
async def test_an_invalid_message_ends_the_stream(message, field):
    """The error names the field, and nothing of the message is applied."""
    async with busy_mesh() as (mesh, router), RawStream(mesh, router) as stream:
        await stream.call.write(message)
        with pytest.raises(Exception) as raised:
            await stream.answer()
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequestError)
        assert error.field == field


async def test_a_stopping_router_leaves_no_ask_unanswered():
    """Asks that wait on a stopping router move to the other router, and are placed there."""
    async with busy_mesh() as (mesh, first):
        link = await mesh.link()
        await link.place(ask("r1", [1]), timeout_s=PATIENCE_S)
        waiting = [
            asyncio.create_task(link.place(ask(f"w{i}", [1], timeout_s=20), timeout_s=PATIENCE_S)) for i in range(5)
        ]
        await eventually(lambda: first.core.queue.requests == 5)
        second = await mesh.router("router-2")
        await eventually(lambda: second.takes() == {"d1"})
        await mesh.registry.set_draining(first.name, True)
        first.servicer.end_streams()
        placed = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
        assert len({p.ask_id for p in placed}) == 5
        await eventually(lambda: first.core.queue.requests == 0)
        await eventually(lambda: link.router_ids[:1] == ("router-2",))


async def test_each_ask_of_a_message_is_answered():
    """The reports of a message are applied before its asks, and an invalid ask does not affect others."""
    async with busy_mesh(requests_max=3) as (mesh, router):
        call = RouterServiceStub(mesh.channels.channel(router.server.address)).Route()
        await call.write(pb.RouteRequest(hello=pb.Hello(frontend_id="f")))
        await call.initial_metadata()
        asks = [pb.Ask(ask_id=n, request_id=f"r{n}", prompt_tokens=3, model="demo") for n in range(1, 6)]
        asks[1].ClearField("model")
        await call.write(pb.RouteRequest(asks=asks))
        responses = await _answers(call, 5)
        assert responses == {1: "d1", 3: "d1", 4: "d1", 2: "invalid_request", 5: "queued"}
        report = to_report(1, Report(kind=ReportKind.FINISHED, elapsed_s=0.1))
        more = pb.Ask(ask_id=6, request_id="r6", prompt_tokens=3, model="demo")
        await call.write(pb.RouteRequest(reports=[report], asks=[more]))
        assert await _answers(call, 2, placed={5}) == {5: "d1", 6: "queued"}
        call.cancel()


async def _answers(call, count: int, *, placed: Collection[int] = ()) -> dict[int, str]:
    """Return the answer to each of `count` asks: a worker, a reason or `queued`.

    The router repeats `queued` while an ask waits, so that answer is not final for an ask in `placed`.
    """
    responses: dict[int, str] = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(responses) < count or any(responses.get(ask_id, "queued") == "queued" for ask_id in placed):
            message = await call.read()
            for placement in message.placements:
                responses[placement.ask_id] = placement.decode.worker_id
            for refusal in message.refusals:
                responses[refusal.ask_id] = refusal.error.reason
            for ask_id in message.queued_ask_ids:
                responses.setdefault(ask_id, "queued")
    return responses
