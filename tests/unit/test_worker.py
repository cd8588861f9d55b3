"""The Worker object on the simulated engine: finishes, leases, watches, drain."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvmesh.core import FinishReason, KvRemoved, KvStored, Leg, LegTask, TokenLogprob
from kvmesh.engines.base import EngineFinish
from kvmesh.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvmesh.simulation.faulty_engine import Die, Stall
from kvmesh.worker.cancel_watch import CancelWatch
from kvmesh.worker.kv_feed import BLOCKS_PER_MESSAGE, EVENTS_PER_MESSAGE, KvEventFeed
from kvmesh.worker.single_leg import LegStep, stream_leg
from kvmesh.worker.slots import SLOT_MASK, LegRecord, LegTable, LinkStep, key_of
from kvmesh.worker.worker import CallerLink, Worker
from tests.patience import PATIENCE_S
from tests.worker_rig import SLOW, WORKER, WorkerRig, make_leg, make_worker, wait_until


@dataclass
class RecordingOutlet:
    """A link's outlet that records what it receives."""

    tokens: dict[int, int] = field(default_factory=dict)
    finishes: list[EngineFinish] = field(default_factory=list)
    lost: list[MeshError] = field(default_factory=list)
    breaks: bool = False

    def on_step(self, step: int, share: LinkStep, logprobs: Mapping[int, Sequence[TokenLogprob]]) -> None:
        if self.breaks:
            raise KeyError("a defect of the outlet")
        for position, slot in enumerate(share.slots):
            count = share.counts[position] if share.counts else 1
            self.tokens[slot] = self.tokens.get(slot, 0) + count
        self.finishes += share.finishes

    def on_lost(self, error: MeshError) -> None:
        self.lost.append(error)

    def slots(self) -> list[int]:
        return sorted(finish.key & SLOT_MASK for finish in self.finishes)


@pytest.fixture
async def rig() -> AsyncIterator[WorkerRig]:
    one = make_worker(replace(SLOW, role="prefill"), WORKER)
    await one.worker.start()
    yield one
    await one.worker.aclose()


def submit(link: CallerLink, slot: int = 1, leg_id: str = "", *, timeout_s: float | None = None, **more: Any) -> None:
    """Submits a leg that generates for a long time."""
    link.submit_nowait(slot, make_leg(leg_id or f"r{slot}", **{"tokens": 4000, **more}), timeout_s)


async def run_prefill(worker: Worker, leg_id: str = "p") -> EngineFinish:
    """Runs a prompt of a plain client; returns its finish."""
    return await run_plain(worker, make_leg(leg_id, LegTask.PREFILL))


async def run_plain(worker: Worker, leg: Leg, timeout_s: float | None = None) -> EngineFinish:
    """Runs a leg of a plain client to its finish."""
    async with aclosing(stream_leg(worker, leg, timeout_s=timeout_s)) as steps:  # type: ignore[type-var]
        return [step async for step in steps][-1].finish


def lease_left_s(worker: Worker, finish: EngineFinish) -> float:
    """The remaining lease as it would be sent now."""
    assert finish.handle is not None
    return worker.lease_left_s(finish.handle)


async def test_each_leg_has_one_finish(rig: WorkerRig) -> None:
    """Finished, cancelled and overdue legs get one finish each, and leave no state."""
    outlet = RecordingOutlet()
    link = rig.worker.open_link(outlet)
    submit(link, 1, tokens=5)
    submit(link, 2)
    submit(link, 3, timeout_s=0.05)
    link.cancel_nowait(2)
    link.cancel_nowait(2)
    link.cancel_nowait(99)
    await wait_until(lambda: len(outlet.finishes) == 3, "three finishes")
    reasons = {finish.key & SLOT_MASK: finish.reason for finish in outlet.finishes}
    assert reasons == {1: FinishReason.LENGTH, 2: FinishReason.CANCELLED, 3: FinishReason.ERROR}
    assert outlet.tokens[1] == 5
    assert [type(finish.error) for finish in outlet.finishes if finish.error] == [DeadlineError]
    await rig.worker.wait_idle()
    await rig.wait_free()


async def test_refused_legs_leave_no_state(rig: WorkerRig) -> None:
    """Each refusal has its error class. Slot and id can be used again."""
    link = rig.worker.open_link(RecordingOutlet(), legs_max=1)
    good = make_leg("r1", tokens=4000)
    cases: list[tuple[int, Leg, float | None, type[MeshError]]] = [
        (1, replace(good, generation=replace(good.generation, model="other")), None, NotFoundError),
        (1, replace(good, generation=replace(good.generation, token_ids=[10**6])), None, InvalidRequestError),
        (1 << 31, good, None, InvalidRequestError),
        (1, good, 0.0, DeadlineError),
        (1, good, -1.0, DeadlineError),
    ]
    for slot, leg, timeout_s, error in cases:
        with pytest.raises(error):
            link.submit_nowait(slot, leg, timeout_s)
        assert rig.worker.statistics().legs == 0
    link.submit_nowait(1, good)
    with pytest.raises(OverloadedError):
        submit(link, 2)
    other = rig.worker.open_link(RecordingOutlet())
    with pytest.raises(InvalidRequestError) as refused:
        submit(other, 5, leg_id="r1")
    assert refused.value.reason == "leg_id_in_use"
    submit(other, 6)
    with pytest.raises(InvalidRequestError) as refused:
        submit(other, 6, leg_id="another")
    assert (refused.value.reason, refused.value.field) == ("slot_in_use", "slot")


async def test_a_closed_link_accepts_and_receives_nothing(rig: WorkerRig) -> None:
    """Its legs are cancelled and their finishes dropped. Another link with the same slots is not affected."""
    gone, stays = RecordingOutlet(), RecordingOutlet()
    closing, standing = rig.worker.open_link(gone), rig.worker.open_link(stays)
    submit(closing, 1, "a")
    submit(standing, 1, "b", tokens=20)
    closing.close_nowait()
    closing.close_nowait()
    with pytest.raises(UnavailableError):
        submit(closing, 2)
    await wait_until(lambda: stays.slots() == [1], "the other link's leg is done")
    assert not gone.finishes and stays.tokens == {1: 20}
    await rig.wait_free()


async def test_legs_are_refused_only_while_draining(rig: WorkerRig) -> None:
    """Drain waits for running legs. A worker that is stopping never accepts legs again."""
    outlet = RecordingOutlet()
    link = rig.worker.open_link(outlet)
    submit(link, 1, tokens=30)
    assert await rig.worker.drain(0.0) == 1
    with pytest.raises(UnavailableError):
        submit(link, 2)
    assert await rig.worker.drain(PATIENCE_S) == 0 and outlet.slots() == [1]
    rig.worker.set_draining(False)
    submit(link, 2, tokens=1)
    rig.worker.stop_nowait()
    rig.worker.set_draining(False)
    with pytest.raises(UnavailableError):
        submit(link, 3)


async def test_the_death_of_the_engine_is_reported_once(rig: WorkerRig) -> None:
    """Links are notified, watches end, `run` raises the error, and later links are notified at once."""
    outlet = RecordingOutlet()
    submit(rig.worker.open_link(outlet), 1)
    running = asyncio.ensure_future(rig.worker.run())
    watch = asyncio.ensure_future(_read_watch(rig.worker.kv_feed))
    await wait_until(lambda: rig.worker.statistics().kv_watchers == 1, "the watch is open")
    rig.engine.inject(Die())
    with pytest.raises(LostError):
        await asyncio.wait_for(running, PATIENCE_S)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(watch, PATIENCE_S)
    assert len(outlet.lost) == 1 and rig.worker.statistics().legs == 0
    late = RecordingOutlet()
    link = rig.worker.open_link(late)
    assert len(late.lost) == 1
    with pytest.raises(UnavailableError):
        submit(link, 2)
    assert await rig.worker.drain(0.0) == 0


async def _read_watch(feed: KvEventFeed) -> None:
    async for _ in feed.watch():
        pass


async def test_an_exception_in_the_step_loop_ends_the_worker(rig: WorkerRig) -> None:
    """The worker ends with LostError, and no caller waits forever."""
    broken = RecordingOutlet(breaks=True)
    waiting = asyncio.ensure_future(run_plain(rig.worker, make_leg("waits", tokens=4000)))
    await asyncio.sleep(0)
    submit(rig.worker.open_link(broken), 1, "breaks")
    with pytest.raises(LostError) as caught:
        await asyncio.wait_for(rig.worker.run(), PATIENCE_S)
    assert caught.value.reason == "worker_defect"
    with pytest.raises(LostError):
        await asyncio.wait_for(waiting, PATIENCE_S)


async def test_an_invalid_kv_event_ends_the_worker(rig: WorkerRig) -> None:
    """The removal of an unknown block, for example, ends the worker even if a timer finds it."""
    rig.worker._kv_batcher.put_nowait([KvRemoved(block_hashes=[1])])
    rig.worker.kv_feed.append_nowait([KvStored(block_hashes=[2])])
    with pytest.raises(LostError) as caught:
        await asyncio.wait_for(rig.worker.run(), PATIENCE_S)
    assert caught.value.reason == "worker_defect"


async def test_an_engine_that_does_not_answer_a_cancel_ends_the_worker() -> None:
    """Otherwise it would hold the leg's blocks forever. Other legs are lost and can continue on another worker."""
    rig = make_worker(SLOW, replace(WORKER, cancel_timeout_s=0.2))
    await rig.worker.start()
    link, others = rig.worker.open_link(RecordingOutlet()), RecordingOutlet()
    submit(rig.worker.open_link(others), 2, "of another caller")
    submit(link, 1)
    rig.engine.inject(Stall(duration_s=10 * PATIENCE_S))
    await asyncio.sleep(0.05)
    link.cancel_nowait(1)
    assert rig.worker.statistics().unanswered_cancels == 1
    with pytest.raises(LostError) as caught:
        await asyncio.wait_for(rig.worker.run(), PATIENCE_S)
    assert caught.value.reason == "engine_wedged"
    assert [error.reason for error in others.lost] == ["engine_wedged"]
    assert rig.worker.statistics().unanswered_cancels == 0
    await rig.worker.aclose()


def test_a_suspended_process_does_not_time_out_cancellations() -> None:
    """After a suspension longer than the limit, the engine still gets time to answer. Ended legs do not count."""
    watch = CancelWatch(limit_s=1.0, sweep_s_max=0.5)
    watch.add(1)
    watch.add(2)
    assert [watch.sweep(at_s) for at_s in (0.0, 0.4, 60.0)] == [0, 0, 0]
    watch.remove(2)
    watch.add(1)
    assert [watch.sweep(at_s) for at_s in (60.05, 60.5)] == [0, 1]


async def test_closing_ends_all_legs_as_lost() -> None:
    """Every leg in flight ends as lost, not as cancelled. No handle or block remains."""
    rig = make_worker(replace(SLOW, role="prefill"), WORKER)
    await rig.worker.start()
    handed = await run_prefill(rig.worker, "handed")
    assert handed.handle is not None and lease_left_s(rig.worker, handed) > 0
    rig.engine.inject(Stall(duration_s=10 * PATIENCE_S))
    waiting = [asyncio.ensure_future(run_prefill(rig.worker, f"p{i}")) for i in range(3)]
    await asyncio.sleep(0.02)
    await asyncio.wait_for(rig.worker.aclose(), PATIENCE_S)
    await rig.worker.aclose()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(result, LostError) for result in results)
    assert rig.worker.statistics().leases == 0 and rig.engine.load().kv_blocks_used == 0
    await asyncio.wait_for(rig.worker.run(), PATIENCE_S)


async def test_closing_delivers_the_last_finishes() -> None:
    """The engine's last outputs are read before the reader ends."""
    rig = make_worker(SLOW, WORKER)
    await rig.worker.start()
    outlet = RecordingOutlet()
    link = rig.worker.open_link(outlet)
    for slot in range(5):
        submit(link, slot)
    await asyncio.sleep(0.02)
    await rig.worker.aclose()
    assert outlet.slots() == [0, 1, 2, 3, 4]
    assert all(isinstance(finish.error, LostError) for finish in outlet.finishes)


# Leases


async def test_a_stopping_worker_waits_for_its_handles(rig: WorkerRig) -> None:
    """It waits while a handle is not pulled, and no longer."""
    handle = (await run_prefill(rig.worker)).handle
    assert handle is not None
    waiting = asyncio.create_task(rig.worker.wait_handles_gone())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    rig.worker.release_nowait(handle.handle_id)
    async with asyncio.timeout(PATIENCE_S):
        await waiting


async def test_a_handle_of_a_cancelled_caller_is_released(rig: WorkerRig) -> None:
    """A handle is released if its caller was cancelled before, or at the moment when, the finish arrives."""
    for delay in range(12):
        task = asyncio.ensure_future(run_prefill(rig.worker, f"p{delay}"))
        if delay < 4:
            for _ in range(delay):
                await asyncio.sleep(0)
        else:
            # The steps of 5 ms make the finish arrive about here.
            await asyncio.sleep(0.0045 + 0.0003 * delay)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, EngineFinish):
            assert result.handle is not None
            assert rig.worker.release_nowait(result.handle.handle_id)
        await rig.wait_free()
        assert rig.worker.statistics().leases == 0


async def test_a_queued_handle_of_a_cancelled_caller_is_released(rig: WorkerRig) -> None:
    """A handle is released if the finish waits in the caller's queue when the caller is cancelled."""
    task = asyncio.ensure_future(run_prefill(rig.worker))
    await wait_until(lambda: rig.worker.statistics().legs == 1, "submitted")
    while rig.worker.statistics().leases == 0:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        handle = task.result().handle
        assert handle is not None and rig.worker.release_nowait(handle.handle_id)
    await rig.wait_free()


async def test_a_handle_of_an_overdue_leg_is_released(rig: WorkerRig) -> None:
    """If the deadline passed during the last step, the leg fails and its handle is released at once."""
    outlet = RecordingOutlet()
    link = rig.worker.open_link(outlet)
    link.submit_nowait(4, make_leg("p", LegTask.PREFILL))
    # The step that hands the prompt off is already running, so its finish has a handle even if the leg is cancelled now.
    while not rig.engine.load().kv_blocks_leased:
        await asyncio.sleep(0)
    assert not outlet.finishes
    rig.worker._fail(key_of(link.number, 4), DeadlineError("late"))
    assert rig.engine.load().kv_blocks_leased, "the engine has handed the prompt off"
    await wait_until(lambda: bool(outlet.finishes), "its finish")
    assert outlet.finishes[0].handle is None and isinstance(outlet.finishes[0].error, DeadlineError)
    assert (rig.worker.statistics().leases, rig.engine.load().kv_blocks_leased) == (0, 0)
    await rig.wait_free()


async def test_a_handle_of_a_leg_cancelled_during_handoff_is_released(rig: WorkerRig) -> None:
    """The frontend gets a CANCELLED finish without a handle."""
    outlet = RecordingOutlet()
    link = rig.worker.open_link(outlet)
    link.submit_nowait(4, make_leg("p", LegTask.PREFILL))
    while not rig.engine.load().kv_blocks_leased:
        await asyncio.sleep(0)
    assert not outlet.finishes
    link.cancel_nowait(4)
    await wait_until(lambda: bool(outlet.finishes), "its finish")
    assert outlet.finishes[0].handle is None and outlet.finishes[0].reason is FinishReason.CANCELLED
    assert (rig.worker.statistics().leases, rig.engine.load().kv_blocks_leased) == (0, 0)
    await rig.wait_free()


async def test_a_handle_of_a_closed_link_is_released(rig: WorkerRig) -> None:
    """A handle is released if the link closed during the last step."""
    link = rig.worker.open_link(RecordingOutlet())
    link.submit_nowait(4, make_leg("p", LegTask.PREFILL))
    while not rig.engine.load().kv_blocks_leased:
        await asyncio.sleep(0)
    assert link.has_leg(4)
    link.close_nowait()
    await wait_until(lambda: not link.has_leg(4), "its finish")
    assert (rig.worker.statistics().leases, rig.engine.load().kv_blocks_leased) == (0, 0)


async def test_legs_are_bounded() -> None:
    """At most `legs_max` legs run over all links. The refusal has a retry delay."""
    rig = make_worker(SLOW, replace(WORKER, legs_max=2))
    await rig.worker.start()
    links = [rig.worker.open_link(RecordingOutlet()) for _ in range(2)]
    for number, link in enumerate(links):
        submit(link, number, leg_id=f"r{number}")
    with pytest.raises(OverloadedError) as refused:
        submit(links[0], 7)
    assert refused.value.reason == "worker_full"
    assert refused.value.retry_after_s
    await rig.worker.aclose()


async def test_a_release_ends_a_lease() -> None:
    """A handle is released once. Until then its lease has time left."""
    lease_s = 10 * PATIENCE_S
    rig = make_worker(replace(SLOW, role="prefill", lease_s=lease_s), WORKER)
    await rig.worker.start()
    finish = await run_prefill(rig.worker, "a")
    handle = finish.handle
    assert handle is not None
    assert handle.worker_id == "w1" and handle.worker_epoch == 7
    assert 0 < lease_left_s(rig.worker, finish) <= lease_s
    assert [rig.worker.release_nowait(handle.handle_id) for _ in range(2)] == [True, False]
    assert lease_left_s(rig.worker, finish) == 0
    await rig.wait_free()
    await rig.worker.aclose()


async def test_time_ends_a_lease() -> None:
    """A lease ends by time, in the engine and in the worker's record."""
    rig = make_worker(replace(SLOW, role="prefill", lease_s=0.2), WORKER)
    await rig.worker.start()
    finish = await run_prefill(rig.worker, "a")
    assert lease_left_s(rig.worker, finish) <= 0.2
    await wait_until(lambda: rig.worker.statistics().leases == 0, "the lease is over")
    await wait_until(lambda: lease_left_s(rig.worker, finish) == 0, "the worker's record of the lease has ended")
    await rig.wait_free()
    await rig.worker.aclose()


# Legs of plain clients


async def test_a_plain_stream_gives_tokens_then_the_finish(rig: WorkerRig) -> None:
    """Steps arrive in order, and the finish is last."""
    steps: list[LegStep] = [step async for step in stream_leg(rig.worker, make_leg("s", tokens=6), timeout_s=None)]
    assert sum(len(step.token_ids) for step in steps) == 6
    assert [step.finish is not None for step in steps] == [False] * (len(steps) - 1) + [True]


async def test_closing_a_plain_stream_cancels_its_leg(rig: WorkerRig) -> None:
    """Closing the stream cancels the leg, and a deadline fails it."""
    stream = stream_leg(rig.worker, make_leg("s", tokens=4000), timeout_s=None)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await rig.wait_free()
    with pytest.raises(DeadlineError):
        await run_plain(rig.worker, make_leg("d", tokens=4000), 0.05)
    await rig.wait_free()


# The tables


def test_deadlines_of_ended_legs_are_removed() -> None:
    """Legs that end before their deadline leave no state, and a slot's next leg does not inherit a deadline."""
    legs = LegTable()
    for number in range(10_000):
        legs.add(key_of(0, 1), LegRecord(leg_id="same", deadline_s=600.0 + number))
        legs.remove(key_of(0, 1))
        assert len(legs._deadlines) < 100
    legs.add(key_of(0, 1), LegRecord(leg_id="same", deadline_s=1.0))
    legs.remove(key_of(0, 1))
    legs.add(key_of(0, 1), LegRecord(leg_id="same", deadline_s=2.0))
    assert legs.collect_overdue(1.5) == []
    assert legs.collect_overdue(2.0) == [key_of(0, 1)]
    assert legs.collect_overdue(3.0) == []


async def test_no_kv_message_exceeds_the_contract() -> None:
    """However many events an engine or a snapshot has, a message has at most 4096 events and 65 536 blocks, in order."""
    feed = KvEventFeed(epoch=1, history_max=10, buffer_max=10_000)
    long_run = KvStored(block_hashes=range(1, 3 * BLOCKS_PER_MESSAGE))
    many = [KvStored(block_hashes=[10**6 + i]) for i in range(2 * EVENTS_PER_MESSAGE + 1)]
    feed.append_nowait([long_run, *many])
    blocks = 3 * BLOCKS_PER_MESSAGE - 1 + len(many)
    assert feed.blocks_count() == blocks
    parents: dict[int, int | None] = {}
    async for batch in feed.watch():
        assert batch.is_snapshot
        assert len(batch.events) <= EVENTS_PER_MESSAGE
        assert sum(len(event.block_hashes) for event in batch.events if isinstance(event, KvStored)) <= 65_536
        for event in batch.events:
            assert isinstance(event, KvStored)
            parent = event.parent_hash
            for block_hash in event.block_hashes:
                parents[block_hash], parent = parent, block_hash
        if batch.is_complete:
            break
    assert len(parents) == blocks
    assert all(parents[h] == (h - 1 or None) for h in range(1, 3 * BLOCKS_PER_MESSAGE))


async def test_a_closed_feed_ends_its_watches() -> None:
    """Open watches end after their buffered events, new ones at once."""
    feed = KvEventFeed(epoch=1, history_max=10, buffer_max=10)
    watch = feed.watch()
    assert (await anext(watch)).is_snapshot
    feed.append_nowait([KvStored(block_hashes=[1])])
    feed.close_nowait(InternalError("over"))
    assert (await anext(watch)).sequence == 1
    with pytest.raises(InternalError):
        await anext(watch)
    with pytest.raises(InternalError):
        await anext(feed.watch())
    assert feed.watchers_count() == 0


async def test_a_full_worker_refuses_with_a_retry_delay() -> None:
    """The delay keeps callers from retrying at once."""
    rig = make_worker(replace(SLOW, role="decode"), replace(WORKER, legs_max=2))
    await rig.worker.start()
    link = rig.worker.open_link(RecordingOutlet())
    submit(link, 1)
    submit(link, 2)
    with pytest.raises(OverloadedError) as refused:
        submit(link, 3)
    assert refused.value.reason == "worker_full"
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s > 0
    await rig.worker.aclose()
