"""The guarantees of legs.proto and worker.proto, over grpc.aio on loopback and over MemoryNetwork."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import pytest

from kvmesh.api.decode.v1.decode_pb2_grpc import (
    DecodeServiceServicer,
    DecodeServiceStub,
    add_DecodeServiceServicer_to_server,
)
from kvmesh.api.errors.v1 import errors_pb2
from kvmesh.api.prefill.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.api.types.v1 import output_pb2
from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.api.worker.v1 import worker_pb2
from kvmesh.api.worker.v1.worker_pb2_grpc import WorkerServiceStub
from kvmesh.clock import SystemClock
from kvmesh.core import Constraint, ConstraintKind, FinishReason, LegFinish, LegTask, Role, TokenLogprob, WorkerRef
from kvmesh.engines.simulated.settings import StepProfile
from kvmesh.errors import InvalidRequestError, LostError, OverloadedError, UnavailableError
from kvmesh.identity.roles import MeshRole
from kvmesh.rpc.codec.legs import from_finish, to_leg
from kvmesh.rpc.codec.scalars import to_duration
from kvmesh.rpc.leg_link import GrpcLegLink, GrpcLegLinks
from kvmesh.rpc.status import from_rpc_error
from kvmesh.rpc.whole_leg import WholeLeg, run_leg
from kvmesh.simulation.faulty_engine import Die, Stall
from tests.patience import PATIENCE_S
from tests.worker_rig import (
    EPOCH,
    SLOW,
    WORKER,
    RawFrontend,
    WorkerRig,
    make_leg,
    running_worker,
    serving,
    stopped,
    submission,
    wait_until,
)

LONG_S = 10 * PATIENCE_S
"""Timeout of legs that must not end by it, however busy the machine is."""


@pytest.fixture(params=["grpc", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def rig(kind: str) -> AsyncIterator[WorkerRig]:
    async with running_worker(kind) as one:
        yield one


@pytest.fixture
async def prefill(kind: str) -> AsyncIterator[WorkerRig]:
    async with running_worker(kind, Role.PREFILL) as one:
        yield one


@dataclass
class Sink:
    """Records one leg as the frontend's link receives it."""

    tokens: list[int] = field(default_factory=list)
    finishes: list[LegFinish] = field(default_factory=list)
    then: Callable[[], None] = lambda: None

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        assert not self.finishes
        self.tokens += token_ids

    def on_finish(self, finish: LegFinish) -> None:
        self.finishes.append(finish)
        self.then()


async def read_to_end(call: Any) -> None:
    """Returns all messages of a stream; raises unless it ended with OK."""
    async with asyncio.timeout(PATIENCE_S):
        while await call.read() is not grpc.aio.EOF:
            pass


def links_to(rig: WorkerRig) -> GrpcLegLinks:
    return GrpcLegLinks(rig.channels, frontend_id="f1", clock=SystemClock())


# Attach


async def test_the_frontend_speaks_first(rig: WorkerRig) -> None:
    """Rule 1: a first message other than a Hello with an id is rejected, and so is a second Hello."""
    for first in (pb.AttachRequest(cancels=[1]), pb.AttachRequest(hello=pb.Hello())):
        call = DecodeServiceStub(rig.channel).Attach()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.call.write(pb.AttachRequest(hello=pb.Hello(frontend_id="again")))
    error = await frontend.read_to_end()
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_every_submission_gets_one_finish(rig: WorkerRig) -> None:
    """Rules 2 and 3: finished, rejected, cancelled and overdue legs; tokens before the finish; no state is left."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.submit(1, 2, tokens=12)
    await frontend.submit(3, prompt=[999_999])
    await frontend.submit(4, model="another")
    await frontend.submit(5, tokens=4000)
    await frontend.submit(6, tokens=4000, timeout_s=0.1)
    await frontend.send(pb.Submission(slot=7))
    await frontend.send(cancels=[5, 77])
    finishes = await frontend.read_finishes(1, 2, 3, 4, 5, 6, 7)
    reasons = [finishes[slot].reason for slot in range(1, 8)]
    error, length = output_pb2.FINISH_REASON_ERROR, output_pb2.FINISH_REASON_LENGTH
    assert reasons == [length, length, error, error, output_pb2.FINISH_REASON_CANCELLED, error, error]
    kinds = [finishes[slot].error.kind for slot in (3, 4, 6, 7)]
    assert kinds == [
        errors_pb2.ERROR_KIND_INVALID,
        errors_pb2.ERROR_KIND_NOT_FOUND,
        errors_pb2.ERROR_KIND_DEADLINE,
        errors_pb2.ERROR_KIND_INVALID,
    ]
    assert [len(frontend.tokens[slot]) for slot in (1, 2)] == [12, 12]
    assert finishes[1].usage.output_tokens == 12
    await rig.wait_free()


async def test_a_slot_and_an_id_are_free_after_the_finish(rig: WorkerRig) -> None:
    """Rule 3: the same slot, even with the same request id, serves the next request."""
    frontend = await RawFrontend.attach(rig.channel)
    for _ in range(3):
        await frontend.submit(9, tokens=3)
        await frontend.read_finishes(9)
        assert len(frontend.tokens.pop(9)) == 3
        del frontend.finishes[9]


async def test_a_slot_in_use_ends_the_stream(rig: WorkerRig) -> None:
    """A second leg on a used slot ends the stream, because its finish could not be distinguished from the first one's."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.submit(1, tokens=4000)
    await frontend.send(submission(1, make_leg("other")))
    error = await frontend.read_to_end()
    assert error is not None and from_rpc_error(error).reason == "slot_in_use"
    assert not frontend.finishes
    await rig.wait_free()


async def test_cancels_follow_the_submissions_of_their_message(rig: WorkerRig) -> None:
    """One message may hold a submission and its cancel."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.send(submission(1, make_leg("r", tokens=4000)), cancels=[1])
    finishes = await frontend.read_finishes(1)
    assert finishes[1].reason == output_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_the_end_of_the_stream_frees_the_blocks(rig: WorkerRig, how: str) -> None:
    """Rule 5: legs are cancelled and their blocks freed, for both ways in which a frontend ends the stream."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.submit(1, 2, 3, tokens=4000)
    await frontend.read_until(lambda: len(frontend.tokens) == 3)
    if how == "cancel":
        frontend.call.cancel()
    else:
        await frontend.call.done_writing()
        assert await frontend.read_to_end() is None
    await rig.wait_free()
    await wait_until(lambda: rig.worker.statistics().links == 0, "no link is left")


async def test_an_idle_stream_has_heartbeats(rig: WorkerRig) -> None:
    """Rule 6: an idle stream gets a frame per heartbeat."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.read_until(lambda: frontend.heartbeats == 2)


async def test_requests_of_a_stream_are_limited(kind: str) -> None:
    """The worker enforces `submissions_max`. A rejected leg may run on another stream."""
    async with running_worker(kind, settings=replace(WORKER, submissions_max=2)) as rig:
        frontend = await RawFrontend.attach(rig.channel)
        await frontend.submit(1, 2, 3, tokens=400)
        finishes = await frontend.read_finishes(3)
        assert finishes[3].error.reason == "link_full"
        other = await RawFrontend.attach(rig.channel, "f2")
        await other.send(submission(1, make_leg("other", tokens=2)))
        assert (await other.read_finishes(1))[1].reason == output_pb2.FINISH_REASON_LENGTH


async def test_submissions_of_a_message_are_limited(rig: WorkerRig) -> None:
    """A message with more than 1 024 submissions, the contract's limit, is rejected."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.send(*(pb.Submission(slot=slot) for slot in range(1025)))
    error = await frontend.read_to_end()
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_engines_death_ends_all_streams(rig: WorkerRig) -> None:
    """Attach ends with ABORTED. Watches end with UNAVAILABLE, so that routers stop using the worker. New streams are rejected."""
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.submit(1, tokens=4000)
    watch = WorkerServiceStub(rig.channel).WatchKv(worker_pb2.WatchKvRequest())
    load = WorkerServiceStub(rig.channel).WatchLoad(worker_pb2.WatchLoadRequest())
    await asyncio.gather(watch.read(), load.read())
    rig.engine.inject(Die())
    error = await frontend.read_to_end()
    assert error is not None and error.code() is grpc.StatusCode.ABORTED
    for call in (watch, load):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    late = DecodeServiceStub(rig.channel).Attach()
    await late.write(pb.AttachRequest(hello=pb.Hello(frontend_id="late")))
    with pytest.raises(grpc.aio.AioRpcError):
        await read_to_end(late)


async def test_load_watchers_are_notified_of_changes(rig: WorkerRig) -> None:
    """A load record arrives when a request starts or ends and when the worker drains, without waiting for the periodic record, which is a
    minute away."""
    rig.worker.settings = replace(rig.worker.settings, load_interval_s=60.0)
    load = WorkerServiceStub(rig.channel).WatchLoad(worker_pb2.WatchLoadRequest())
    assert (await load.read()).load.running_requests == 0
    frontend = await RawFrontend.attach(rig.channel)
    async with asyncio.timeout(PATIENCE_S):
        await frontend.submit(1, tokens=4000)
        while not (await load.read()).load.running_requests:
            pass
        await frontend.call.write(pb.AttachRequest(cancels=[1]))
        while (await load.read()).load.running_requests:
            pass
        rig.worker.set_draining(True)
        while not (await load.read()).load.is_draining:
            pass
    load.cancel()


async def test_a_worker_with_open_streams_stops_at_once(kind: str) -> None:
    """Neither an idle Attach stream, nor one in use, nor a watch delays the stop by the grace period."""
    async with running_worker(kind, grace_s=600.0) as rig:
        await _stops_with_open_streams(rig)


async def _stops_with_open_streams(rig: WorkerRig) -> None:
    idle, busy = [await RawFrontend.attach(rig.channel, name) for name in ("idle", "busy")]
    await busy.submit(1, tokens=4000)
    await busy.read_until(lambda: bool(busy.tokens))
    watch = WorkerServiceStub(rig.channel).WatchKv(worker_pb2.WatchKvRequest())
    load = WorkerServiceStub(rig.channel).WatchLoad(worker_pb2.WatchLoadRequest())
    await asyncio.gather(watch.read(), load.read())
    rig.worker.stop_nowait()
    async with asyncio.timeout(PATIENCE_S):
        ends = await asyncio.gather(idle.read_to_end(), busy.read_to_end())
        await rig.stop_server()
    assert [from_rpc_error(end).reason for end in ends if end is not None] == ["worker_stopping"] * 2
    await rig.wait_free()


async def test_a_frontend_that_does_not_read_is_cut_off(kind: str) -> None:
    """The legs of a frontend that does not read are cancelled and their blocks freed. Other frontends continue."""
    # Steps take 1 ms, because an engine without delays outruns every reader.
    engine = replace(SLOW, profile=StepProfile(base_s=0.001), context_tokens_max=100_000, kv_blocks=200_000)
    settings = replace(WORKER, link_buffer_frames=500)
    async with running_worker(kind, engine=engine, settings=settings) as rig:
        slow = await RawFrontend.attach(rig.channel, "slow")
        other = await RawFrontend.attach(rig.channel, "other")
        # Log-probabilities fill the connection's window, which grows to megabytes, within a second or two.
        await slow.submit(*range(50), tokens=90_000, logprobs=20, timeout_s=LONG_S)
        await other.send(submission(1, make_leg("other", tokens=2000), LONG_S))
        finishes = await other.read_finishes(1)
        assert finishes[1].reason == output_pb2.FINISH_REASON_LENGTH and len(other.tokens[1]) == 2000
        await rig.wait_free()
        error = await slow.read_to_end()
        assert error is not None and from_rpc_error(error).reason == "link_stalled"
        lengths = {len(tokens) for tokens in slow.tokens.values()}
        assert max(lengths) < 90_000 and not slow.finishes


# The frontend's link


async def test_a_link_carries_legs(rig: WorkerRig) -> None:
    """Each leg gets its tokens and one finish. A cancelled leg finishes as cancelled, and its slot is reused."""
    links = links_to(rig)
    link = await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S)
    assert await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S) is link
    sinks = [Sink() for _ in range(4)]
    cancels = [
        link.submit_nowait(make_leg(f"r{i}", tokens=10 if i else 4000), sink, timeout_s=30.0)
        for i, sink in enumerate(sinks)
    ]
    cancels[0]()
    cancels[0]()
    await wait_until(lambda: all(sink.finishes for sink in sinks), "all finished")
    assert [sink.finishes[0].reason for sink in sinks] == [FinishReason.CANCELLED, *[FinishReason.LENGTH] * 3]
    assert [len(sink.tokens) for sink in sinks[1:]] == [10] * 3
    assert links.statistics() == {"w1": 0}
    await links.aclose()
    await rig.wait_free()
    assert all(len(sink.finishes) == 1 for sink in sinks)


async def test_a_leg_that_cannot_be_encoded_leaves_no_trace(rig: WorkerRig) -> None:
    """Only that leg fails, whatever its fields are. A partial leg in the next message would take another leg's slot and end the stream."""
    links = links_to(rig)
    link = await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S)
    before, after = Sink(), Sink()
    cancel = link.submit_nowait(make_leg("before", tokens=4000), before, timeout_s=30.0)
    await wait_until(lambda: bool(before.tokens), "a leg runs")
    with pytest.raises(UnicodeEncodeError):
        link.submit_nowait(make_leg("half", traceparent="\udcff"), Sink(), timeout_s=30.0)
    link.submit_nowait(make_leg("after", tokens=10), after, timeout_s=30.0)
    await wait_until(lambda: bool(after.finishes), "the next leg ends")
    assert after.finishes[0].reason is FinishReason.LENGTH and len(after.tokens) == 10
    cancel()
    await wait_until(lambda: bool(before.finishes), "the earlier leg ends")
    assert before.finishes[0].reason is FinishReason.CANCELLED
    await links.aclose()
    await rig.wait_free()


@pytest.mark.parametrize("event", ["death", "stop", "closed"])
async def test_a_link_that_ends_fails_its_legs_once(rig: WorkerRig, event: str) -> None:
    """Engine failure, worker stop, frontend close: each leg is lost exactly once, and new legs are rejected or get a new link."""
    links = links_to(rig)
    link = await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S)
    sinks = [Sink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        link.submit_nowait(make_leg(f"r{i}", tokens=4000), sink, timeout_s=30.0)
    await wait_until(lambda: all(sink.tokens for sink in sinks), "all legs run")
    if event == "death":
        rig.engine.inject(Die())
    elif event == "stop":
        rig.worker.stop_nowait()
    else:
        await links.aclose()
    await wait_until(lambda: all(sink.finishes for sink in sinks), "all are lost")
    await asyncio.sleep(0.05)
    assert all(len(sink.finishes) == 1 and isinstance(sink.finishes[0].error, LostError) for sink in sinks)
    with pytest.raises(UnavailableError):
        link.submit_nowait(make_leg("late"), Sink(), timeout_s=30.0)
    await links.aclose()


async def test_legs_beyond_one_message_and_their_cancels(kind: str) -> None:
    """1 024 concurrent long prompts: all are sent, and no cancel is sent before its submission."""
    # Encoding takes the frontend a second, which must not count as silence of the worker.
    async with running_worker(kind, settings=replace(WORKER, heartbeat_s=2.0)) as rig:
        links = links_to(rig)
        link = await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S)
        sinks = [Sink() for _ in range(1024)]
        cancels = [
            link.submit_nowait(make_leg(f"r{i}", prompt=[5] * 3000, tokens=4000), s, timeout_s=LONG_S)
            for i, s in enumerate(sinks)
        ]
        for cancel in cancels:
            cancel()
        await wait_until(lambda: all(sink.finishes for sink in sinks), "all are cancelled")
        assert {sink.finishes[0].reason for sink in sinks} == {FinishReason.CANCELLED}
        await links.aclose()
        await rig.wait_free()


async def test_a_full_link_rejects_legs_and_stays_usable(kind: str) -> None:
    """A leg beyond `submissions_max` is rejected before it is sent. A finished leg makes room."""
    async with running_worker(kind, settings=replace(WORKER, submissions_max=2)) as rig:
        links = links_to(rig)
        link = await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S)
        sinks = [Sink() for _ in range(3)]
        cancel = link.submit_nowait(make_leg("r0", tokens=4000), sinks[0], timeout_s=PATIENCE_S)
        link.submit_nowait(make_leg("r1", tokens=10), sinks[1], timeout_s=PATIENCE_S)
        refused = Sink()
        with pytest.raises(OverloadedError) as caught:
            link.submit_nowait(make_leg("r2"), refused, timeout_s=PATIENCE_S)
        assert caught.value.reason == "link_full" and caught.value.retry_after_s
        await wait_until(lambda: bool(sinks[1].finishes), "one has finished")
        link.submit_nowait(make_leg("r3", tokens=10), sinks[2], timeout_s=PATIENCE_S)
        await wait_until(lambda: bool(sinks[2].finishes), "the next one too")
        assert sinks[2].finishes[0].reason is FinishReason.LENGTH
        cancel()
        await wait_until(lambda: bool(sinks[0].finishes), "the long one is cancelled")
        assert sinks[0].finishes[0].reason is FinishReason.CANCELLED
        assert not refused.tokens and not refused.finishes
        await links.aclose()
        await rig.wait_free()


class ScriptedDecode(DecodeServiceServicer):
    """A worker that sends what the test specifies."""

    def __init__(self, heartbeat_s: float = 60.0, worker_id: str = "w1") -> None:
        self.received: list[pb.AttachRequest] = []
        self.frames: asyncio.Queue[pb.StepFrame] = asyncio.Queue()
        self.attached = 0
        self._welcome = pb.Welcome(
            worker_id=worker_id, epoch=EPOCH, heartbeat=to_duration(heartbeat_s), submissions_max=100
        )

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.attached += 1
        await anext(aiter(request_iterator))
        await context.write(pb.AttachResponse(welcome=self._welcome))
        reader = asyncio.create_task(self._read(request_iterator))
        # Only the first stream gets the frames.
        frames = self.frames if self.attached == 1 else asyncio.Queue[pb.StepFrame]()
        try:
            while True:
                await context.write(pb.AttachResponse(frame=await frames.get()))
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            self.received.append(request)


def finish_of(*slots: int) -> pb.StepFrame:
    return pb.StepFrame(
        step=1, finishes=[pb.Finish(slot=slot, reason=output_pb2.FINISH_REASON_LENGTH) for slot in slots]
    )


async def test_a_cancel_that_crosses_does_not_hit_the_next_leg(kind: str) -> None:
    """Slot 1 is cancelled, finishes, and is reused before the link sends a message: the new leg is not cancelled."""
    scripted = ScriptedDecode()
    async with serving(kind, lambda server: add_DecodeServiceServicer_to_server(scripted, server), 0.1) as (
        at,
        pool,
        _,
    ):
        links = GrpcLegLinks(pool, frontend_id="f1", clock=SystemClock())
        link = await links.link(WorkerRef(worker_id="w1", address=at, epoch=EPOCH), Role.DECODE, timeout_s=PATIENCE_S)
        first, second, third = Sink(), Sink(), Sink()
        link.submit_nowait(make_leg("first"), first, timeout_s=30.0)
        cancel_second = link.submit_nowait(make_leg("second"), second, timeout_s=30.0)
        await wait_until(lambda: len(scripted.received) == 1, "both submitted")
        first.then = cancel_second
        second.then = lambda: link.submit_nowait(make_leg("third"), third, timeout_s=30.0) and None
        scripted.frames.put_nowait(finish_of(0, 1))
        await wait_until(lambda: len(scripted.received) == 2, "the third is submitted")
        sent = scripted.received[1]
        assert [submission.slot for submission in sent.submissions] == [1] and not sent.cancels
        await links.aclose()


async def test_a_silent_worker_loses_legs_without_a_token_first(kind: str) -> None:
    """Legs without a token are lost after three missed heartbeats, so that they can start elsewhere. A leg with tokens waits for ten. So does
    a leg with a constraint, because the constraint may be what blocks the worker."""
    scripted = ScriptedDecode(heartbeat_s=0.1)
    async with serving(kind, lambda server: add_DecodeServiceServicer_to_server(scripted, server), 0.1) as (
        at,
        pool,
        _,
    ):
        links = GrpcLegLinks(pool, frontend_id="f1", clock=SystemClock())
        worker = WorkerRef(worker_id="w1", address=at, epoch=EPOCH)
        link = await links.link(worker, Role.DECODE, timeout_s=PATIENCE_S)
        begun, waiting, constrained, began_s = Sink(), Sink(), Sink(), time.monotonic()
        link.submit_nowait(make_leg("begun"), begun, timeout_s=30.0)
        link.submit_nowait(make_leg("waiting"), waiting, timeout_s=30.0)
        constraint = Constraint(kind=ConstraintKind.REGEX, text="a")
        leg = make_leg("constrained")
        sampling = replace(leg.generation.sampling, constraint=constraint)
        leg = replace(leg, generation=replace(leg.generation, sampling=sampling))
        link.submit_nowait(leg, constrained, timeout_s=30.0)
        scripted.frames.put_nowait(pb.StepFrame(step=1, slots=[0], token_ids=[7]))
        await wait_until(lambda: bool(waiting.finishes), "the leg without a token is lost")
        assert time.monotonic() - began_s > 0.2
        assert not begun.finishes and not constrained.finishes
        with pytest.raises(UnavailableError):
            link.submit_nowait(make_leg("late"), Sink(), timeout_s=30.0)
        await wait_until(lambda: bool(begun.finishes), "the leg with a token is lost")
        assert time.monotonic() - began_s > 0.9
        errors = [sink.finishes[0].error for sink in (begun, waiting, constrained)]
        assert [error is not None and error.reason for error in errors] == ["worker_silent"] * 3
        await links.aclose()


async def test_legs_continue_after_a_stall(kind: str) -> None:
    """Legs with tokens continue after the stall, and legs that were given up are cancelled on the worker. New legs get a new link."""
    scripted = ScriptedDecode(heartbeat_s=0.2)
    async with serving(kind, lambda server: add_DecodeServiceServicer_to_server(scripted, server), 0.1) as (
        at,
        pool,
        _,
    ):
        links = GrpcLegLinks(pool, frontend_id="f1", clock=SystemClock())
        worker = WorkerRef(worker_id="w1", address=at, epoch=EPOCH)
        link = await links.link(worker, Role.DECODE, timeout_s=PATIENCE_S)
        begun, waiting = Sink(), Sink()
        link.submit_nowait(make_leg("begun"), begun, timeout_s=30.0)
        link.submit_nowait(make_leg("waiting"), waiting, timeout_s=30.0)
        scripted.frames.put_nowait(pb.StepFrame(step=1, slots=[0], token_ids=[7]))
        await wait_until(lambda: bool(waiting.finishes), "the leg without a token is lost")
        scripted.frames.put_nowait(pb.StepFrame(step=2, slots=[0, 1], token_ids=[8, 9]))
        await wait_until(lambda: begun.tokens == [7, 8], "the other one goes on")
        assert await links.link(worker, Role.DECODE, timeout_s=PATIENCE_S) is not link
        await wait_until(
            lambda: any(1 in request.cancels for request in scripted.received), "the lost leg is cancelled"
        )
        scripted.frames.put_nowait(finish_of(0, 1))
        await wait_until(lambda: bool(begun.finishes), "the end")
        assert not waiting.tokens and len(waiting.finishes) == 1
        assert begun.finishes[0].error is None
        await wait_until(lambda: not link.is_up, "the old link closes after its last leg")
        await links.aclose()


async def test_a_closed_link_is_not_lost(kind: str) -> None:
    """`on_lost` is not called for `aclose`: a link that was replaced must not be opened again."""
    scripted = ScriptedDecode()
    async with serving(kind, lambda server: add_DecodeServiceServicer_to_server(scripted, server), 0.1) as (
        at,
        pool,
        _,
    ):
        worker = WorkerRef(worker_id="w1", address=at, epoch=EPOCH)
        call = DecodeServiceStub(pool.channel(at, MeshRole.DECODE)).Attach()
        lost: list[GrpcLegLink] = []
        link = GrpcLegLink(worker, call, SystemClock(), on_lost=lost.append)
        await link.open("f1", PATIENCE_S)
        sink = Sink()
        link.submit_nowait(make_leg("open"), sink, timeout_s=30.0)
        await wait_until(lambda: bool(scripted.received), "submitted, so the link reads")
        await link.aclose()
        assert [finish.error is not None and finish.error.reason for finish in sink.finishes] == ["link_closed"]
        assert not lost


@pytest.mark.parametrize(("worker_id", "epoch"), [("w2", EPOCH), ("w1", EPOCH + 1)])
async def test_another_worker_at_the_address_is_not_used(kind: str, worker_id: str, epoch: int) -> None:
    """If the address belongs to another worker or to a restarted process, the placement is invalid."""
    scripted = ScriptedDecode()
    async with serving(kind, lambda server: add_DecodeServiceServicer_to_server(scripted, server), 0.1) as (
        at,
        pool,
        _,
    ):
        links = GrpcLegLinks(pool, frontend_id="f1", clock=SystemClock())
        with pytest.raises(UnavailableError) as caught:
            await links.link(WorkerRef(worker_id=worker_id, address=at, epoch=epoch), Role.DECODE, timeout_s=PATIENCE_S)
        assert caught.value.reason == "worker_changed"
        await links.aclose()


async def test_requests_for_a_silent_worker_share_one_attempt(kind: str) -> None:
    """Ten requests on a worker that does not answer fail together after one timeout."""

    class Mute(DecodeServiceServicer):
        attached = 0

        async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            Mute.attached += 1
            await asyncio.sleep(60)

    async with serving(kind, lambda server: add_DecodeServiceServicer_to_server(Mute(), server), 0.1) as (at, pool, _):
        links = GrpcLegLinks(pool, frontend_id="f1", clock=SystemClock())
        ref = WorkerRef(worker_id="w1", address=at, epoch=EPOCH)
        results = await asyncio.gather(
            *(links.link(ref, Role.DECODE, timeout_s=0.3) for _ in range(10)), return_exceptions=True
        )
        assert all(isinstance(result, UnavailableError) for result in results)
        # None, if the timeout ends before the connection is made.
        assert Mute.attached <= 1, "one attempt for all"
        await links.aclose()


async def test_a_request_beyond_the_message_limit_does_not_affect_others(kind: str) -> None:
    """The link rejects the request before sending it, because gRPC would end the stream."""
    # Creating the large request takes long, which must not count as silence of the worker.
    async with running_worker(kind, settings=replace(WORKER, heartbeat_s=2.0)) as rig:
        links = links_to(rig)
        link = await links.link(rig.ref, Role.DECODE, timeout_s=PATIENCE_S)
        sink = Sink()
        link.submit_nowait(make_leg("good", tokens=50), sink, timeout_s=30.0)
        with pytest.raises(InvalidRequestError):
            link.submit_nowait(make_leg("huge", cache_salt="s" * (61 << 20)), Sink(), timeout_s=30.0)
        await wait_until(lambda: bool(sink.finishes), "the other one is done")
        assert sink.finishes[0].reason is FinishReason.LENGTH
        await links.aclose()


# Generate


def plain(leg_id: str = "", task: LegTask = LegTask.GENERATE, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(leg=to_leg(make_leg(leg_id, task, **more)))


async def test_generate_gives_tokens_then_a_finish(rig: WorkerRig) -> None:
    """Responses carry the tokens, and only the last one has a finish."""
    call = DecodeServiceStub(rig.channel).Generate(plain(tokens=6))
    responses = [response async for response in call]
    assert sum(len(response.token_ids) for response in responses) == 6
    assert [response.HasField("finish") for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].finish.reason == output_pb2.FINISH_REASON_LENGTH
    await rig.wait_free()


async def test_generate_is_stopped_by_cancel_and_by_deadline(rig: WorkerRig) -> None:
    """A cancel and a deadline both free the blocks."""
    stub, request = (
        DecodeServiceStub(rig.channel),
        plain(tokens=4000),
    )
    call = stub.Generate(request)
    await call.read()
    call.cancel()
    await rig.wait_free()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Generate(request, timeout=0.2):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.wait_free()


async def test_generate_reports_errors_by_status(rig: WorkerRig) -> None:
    """An invalid field, an id in use, a wrong task and the engine's death each end the call with the right status."""
    stub = DecodeServiceStub(rig.channel)
    request = plain("mine", tokens=4000)
    running = stub.Generate(request)
    await running.read()
    for bad in (pb.GenerateRequest(), request, plain("x" * 129), plain(task=LegTask.PREFILL)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(bad).read()
        refuses_task = bad.leg.task == pb.LEG_TASK_PREFILL
        expected = grpc.StatusCode.FAILED_PRECONDITION if refuses_task else grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.code() is expected
    rig.engine.inject(Die())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_end(running)
    assert caught.value.code() is grpc.StatusCode.ABORTED


# Prefill


async def run_prefill(rig: WorkerRig, leg_id: str = "p1", timeout_s: float = PATIENCE_S, **more: Any) -> LegFinish:
    """Runs a prompt of a plain client."""
    call = PrefillServiceStub(rig.channel).Generate(plain(leg_id, LegTask.PREFILL, **more), timeout=timeout_s)
    (response,) = [response async for response in call]
    return from_finish(response.finish)


async def test_prefill_returns_a_handle_with_a_lease(prefill: WorkerRig) -> None:
    """The remaining lease is less than a whole one. ReleaseKv frees the blocks once."""
    finish = await run_prefill(prefill)
    assert finish.handle is not None and finish.handle.worker_epoch == EPOCH
    assert 0 < finish.handle.lease_s < SLOW.lease_s
    assert prefill.engine.load().kv_blocks_leased > 0 and prefill.worker.statistics().leases == 1
    stub, release = PrefillServiceStub(prefill.channel), pb.ReleaseKvRequest(handle_id=finish.handle.handle_id)
    assert [(await stub.ReleaseKv(release)).was_held for _ in range(2)] == [True, False]
    await prefill.wait_free()


async def test_a_leg_is_released_by_its_id(prefill: WorkerRig) -> None:
    """A caller that does not know the handle can release by leg id: the handle of a finished leg, or the leg itself if it runs. Exactly one
    of the ids is required."""
    stub = PrefillServiceStub(prefill.channel)
    await run_prefill(prefill, "done")
    release = pb.ReleaseKvRequest(leg_id="done")
    assert [(await stub.ReleaseKv(release)).was_held for _ in range(2)] == [True, False]
    await prefill.wait_free()
    with stopped(prefill.engine):
        running = stub.Generate(plain("runs", LegTask.PREFILL, prompt=[5] * 400))
        await wait_until(lambda: prefill.worker.statistics().legs == 1, "it is submitted")
        assert (await stub.ReleaseKv(pb.ReleaseKvRequest(leg_id="runs"))).was_held
    assert [each async for each in running][-1].finish.reason == output_pb2.FINISH_REASON_CANCELLED
    await prefill.wait_free()
    assert prefill.worker.statistics().leases == 0
    for bad in (
        pb.ReleaseKvRequest(),
        pb.ReleaseKvRequest(handle_id="a", leg_id="b"),
        pb.ReleaseKvRequest(leg_id="x" * 129),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ReleaseKv(bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("phase", ["waiting", "computing"])
async def test_a_cancelled_prefill_frees_its_blocks(kind: str, phase: str) -> None:
    """A cancel and a deadline free the blocks, before the leg's first step and during it."""
    async with running_worker(kind, Role.PREFILL) as rig:
        if phase == "waiting":
            rig.engine.inject(Stall(duration_s=0.3))
        call = PrefillServiceStub(rig.channel).Generate(plain("a", LegTask.PREFILL, prompt=[5] * 4000))
        await wait_until(lambda: rig.worker.statistics().legs == 1, "it is submitted")
        call.cancel()
        await rig.wait_free()
        if phase == "waiting":
            rig.engine.inject(Stall(duration_s=0.3))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run_prefill(rig, "b", prompt=[6] * 4000, timeout_s=0.05)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.wait_free()
        assert rig.worker.statistics().leases == 0


async def run_prefill_on_link(rig: WorkerRig, leg_id: str, **more: Any) -> WholeLeg:
    """Runs a prompt over a frontend's link."""
    links = links_to(rig)
    try:
        link = await links.link(rig.ref, Role.PREFILL, timeout_s=PATIENCE_S)
        return await run_leg(link, make_leg(leg_id, LegTask.PREFILL, **more), timeout_s=PATIENCE_S)
    finally:
        await links.aclose()


async def test_prefill_reports_errors_by_status(prefill: WorkerRig) -> None:
    """An unknown model, an invalid token, draining and the engine's death each fail with their own error, and not as the caller's cancel."""
    bad_legs: tuple[tuple[dict[str, Any], grpc.StatusCode], ...] = (
        ({"model": "another"}, grpc.StatusCode.NOT_FOUND),
        ({"prompt": [99_999]}, grpc.StatusCode.INVALID_ARGUMENT),
    )
    for bad, code in bad_legs:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run_prefill(prefill, **bad)
        assert caught.value.code() is code
    prefill.worker.set_draining(True)
    with pytest.raises(UnavailableError):
        await run_prefill_on_link(prefill, "d")
    prefill.worker.set_draining(False)
    prefill.engine.inject(Stall(duration_s=5))
    running = asyncio.ensure_future(run_prefill_on_link(prefill, "x", prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1, "it runs")
    prefill.engine.inject(Die())
    with pytest.raises(LostError):
        await running


async def test_a_stopping_worker_loses_a_prefill_in_time(prefill: WorkerRig) -> None:
    """The leg ends as lost immediately, so that it can be placed elsewhere."""
    prefill.engine.inject(Stall(duration_s=0.5))
    running = asyncio.ensure_future(run_prefill_on_link(prefill, "x"))
    await wait_until(lambda: prefill.worker.statistics().legs == 1, "it runs")
    prefill.worker.stop_nowait()
    with pytest.raises(LostError):
        await running
    await prefill.wait_free()


# Prefill and decode


async def test_sleep_that_is_refused_does_not_drain(rig: WorkerRig) -> None:
    """A worker whose engine cannot sleep continues to serve. An invalid interval is rejected."""
    stub = WorkerServiceStub(rig.channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Sleep(worker_pb2.SleepRequest(level=3))
    assert not rig.worker.is_draining
    for interval_s in (0.0, 0.001, 61.0):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchLoad(worker_pb2.WatchLoadRequest(interval=to_duration(interval_s))).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_drain_counts_requests_in_flight(rig: WorkerRig) -> None:
    """Requests in flight continue, new ones are rejected, and undo accepts them again."""
    stub = WorkerServiceStub(rig.channel)
    frontend = await RawFrontend.attach(rig.channel)
    await frontend.submit(1, tokens=100)
    await frontend.read_until(lambda: bool(frontend.tokens))
    assert (await stub.Drain(worker_pb2.DrainRequest(timeout=to_duration(0)))).requests_in_flight == 1
    await frontend.submit(2)
    finishes = await frontend.read_finishes(1, 2)
    assert finishes[1].reason == output_pb2.FINISH_REASON_LENGTH
    assert finishes[2].error.kind == errors_pb2.ERROR_KIND_UNAVAILABLE
    assert (await stub.Drain(worker_pb2.DrainRequest())).requests_in_flight == 0
    await stub.Drain(worker_pb2.DrainRequest(undo=True))
    await frontend.submit(3)
    assert (await frontend.read_finishes(3))[3].reason == output_pb2.FINISH_REASON_LENGTH
