"""Legs on a prefill worker whose caller waits for the end, over grpc.aio on loopback and over MemoryNetwork."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.api.types.v1 import output_pb2
from kvmesh.api.worker.v1 import legs_pb2 as pb
from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, KvHandle, Leg, LegTask, Role, SamplingParams
from kvmesh.engines.simulated.engine import SimulatedEngine
from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, LostError, NotFoundError
from kvmesh.rpc.clients import LegLink
from kvmesh.rpc.codec.legs import from_finish
from kvmesh.rpc.leg_link import GrpcLegLinks
from kvmesh.rpc.whole_leg import WholeLeg, run_leg
from kvmesh.simulation.faulty_engine import Die, Stall
from kvmesh.worker.frames import RESULTS_PER_FRAME_MAX, FrameOutlet
from tests.conformance.engine_driver import EngineDriver
from tests.patience import PATIENCE_S
from tests.worker_rig import WorkerRig, generation, make_leg, running_worker, wait_until


@pytest.fixture(params=["grpc", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def prefill(kind: str) -> AsyncIterator[WorkerRig]:
    async with running_worker(kind, Role.PREFILL) as one:
        yield one


@pytest.fixture
async def links(prefill: WorkerRig) -> AsyncIterator[GrpcLegLinks]:
    one = GrpcLegLinks(prefill.channels, frontend_id="f1", clock=SystemClock())
    yield one
    await one.aclose()


@pytest.fixture
async def link(prefill: WorkerRig, links: GrpcLegLinks) -> LegLink:
    return await links.link(prefill.ref, Role.PREFILL, timeout_s=PATIENCE_S)


async def compute(link: LegLink, leg_id: str, timeout_s: float = PATIENCE_S, **more: Any) -> KvHandle:
    """Runs a prefill leg and returns its handle."""
    whole = await run_leg(link, make_leg(leg_id, LegTask.PREFILL, **more), timeout_s=timeout_s)
    assert whole.finish is not None and whole.finish.reason is FinishReason.HANDED_OFF
    assert whole.finish.handle is not None and not whole.token_ids
    return whole.finish.handle


async def token(link: LegLink, leg_id: str, timeout_s: float = PATIENCE_S, **more: Any) -> WholeLeg:
    """Returns an answer of one token."""
    return await run_leg(link, make_leg(leg_id, tokens=1, **more), timeout_s=timeout_s)


async def test_prompts_share_a_stream(prefill: WorkerRig, link: LegLink) -> None:
    """Prefill legs share one link of the worker. Each gets its own handle, and a rejected leg its own error."""
    handles = await asyncio.gather(*(compute(link, f"p{i}") for i in range(20)))
    assert len({handle.handle_id for handle in handles}) == 20
    for wrong, error in (({"model": "another"}, NotFoundError), ({"prompt": [99_999]}, InvalidRequestError)):
        with pytest.raises(error):
            await compute(link, "bad", **wrong)  # type: ignore[arg-type]
    assert prefill.worker.statistics().links == 1
    for handle in handles:
        link.release_nowait(handle.handle_id)
    await prefill.wait_free()


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
async def test_an_abandoned_prompt_leaves_no_leg(prefill: WorkerRig, link: LegLink, ends: str) -> None:
    """After a cancel or a deadline the worker has no leg of it, and the stream stays usable."""
    await compute(link, "first")
    # The engine stalls for longer than the deadline, and long enough that the worker has the leg before the deadline.
    prefill.engine.inject(Stall(duration_s=4.0))
    timeout_s = 2.0 if ends == "deadline" else PATIENCE_S
    running = asyncio.ensure_future(compute(link, "p", timeout_s, prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1 or running.done(), "it is submitted")
    if ends == "cancel":
        running.cancel()
    with pytest.raises(asyncio.CancelledError if ends == "cancel" else DeadlineError):
        await running
    await wait_until(lambda: prefill.worker.statistics().legs == 0, "it is gone")
    assert prefill.worker.statistics().leases == 1
    await compute(link, "after")


async def test_a_handle_without_a_waiting_caller_is_released(prefill: WorkerRig, link: LegLink) -> None:
    """Callers that cancel at any moment around the finish leave no lease behind."""
    link.release_nowait((await compute(link, "first")).handle_id)
    for i in range(30):
        running = asyncio.ensure_future(compute(link, f"p{i}", prompt=range(i, i + 40)))
        await asyncio.sleep(0.001 * i)
        running.cancel()
        try:
            handle = await running
        except asyncio.CancelledError:
            continue
        link.release_nowait(handle.handle_id)
    await prefill.wait_free()


class CrossingLink:
    """A link whose leg ends while its caller is being cancelled, before or after the caller's task runs again."""

    worker = None
    tasks = (LegTask.PREFILL,)

    def __init__(self) -> None:
        self.sinks: list[Any] = []
        self.cancelled = 0
        self.released: list[str] = []

    def submit_nowait(self, leg: Leg, sink: Any, *, timeout_s: float) -> Any:
        self.sinks.append(sink)
        return self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1

    def release_nowait(self, handle_id: str) -> None:
        self.released.append(handle_id)


@pytest.mark.parametrize("first", ["finish", "cancel", "cancel, then its task"])
async def test_a_finish_that_crosses_with_a_cancel(first: str) -> None:
    """In any order of finish and cancel, the handle is released and the worker gets a cancel for the leg."""
    link: Any = CrossingLink()
    running = asyncio.ensure_future(run_leg(link, make_leg("p", LegTask.PREFILL), timeout_s=PATIENCE_S))
    await asyncio.sleep(0)
    handle = KvHandle(
        handle_id="h", format="f", compatibility_hash="c", payload=b"", worker_id="w", worker_epoch=1, tokens=1, lease_s=1
    )  # fmt: skip
    finish = from_finish(pb.Finish(reason=output_pb2.FINISH_REASON_HANDED_OFF))
    if first != "finish":
        running.cancel()
    if first == "cancel, then its task":
        await asyncio.sleep(0)
    link.sinks[0].on_finish(replace(finish, handle=handle))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert link.released == ["h"] and link.cancelled == 1


async def test_a_broken_stream_loses_its_prompts(prefill: WorkerRig, link: LegLink, kind: str) -> None:
    """The legs fail as lost, the engine drops them, and the next link is a new stream."""
    running = asyncio.ensure_future(compute(link, "p", prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1, "it is submitted")
    await link.aclose()  # type: ignore[attr-defined]
    with pytest.raises(LostError):
        await running
    await prefill.wait_free()
    links = GrpcLegLinks(prefill.channels, frontend_id="f1", clock=SystemClock())
    await compute(await links.link(prefill.ref, Role.PREFILL, timeout_s=PATIENCE_S), "again")
    await links.aclose()


async def test_a_single_token_is_answered(prefill: WorkerRig, link: LegLink) -> None:
    """A prefill worker answers single tokens with the engine's own token. Only prompts that are handed off leave a lease."""
    answers = await asyncio.gather(*(token(link, f"t{i}", logprobs=2) for i in range(5)))
    handle = await compute(link, "h", tokens=1)
    assert LegTask.GENERATE in link.tasks
    alone = SimulatedEngine(prefill.engine.settings, SystemClock())
    driver = await EngineDriver(alone, PATIENCE_S).start()
    expected = await driver.run(generation(tokens=1, logprobs=2))
    await driver.aclose()
    for answer in answers:
        assert answer.token_ids == expected.tokens
        assert answer.finish is not None and answer.finish.handle is None
        assert answer.finish.reason is FinishReason.LENGTH
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx([expected.logprobs[0].logprob])
        assert answer.prompt_logprobs is None
        assert answer.finish.usage.output_tokens == 1 and answer.finish.usage.prompt_tokens == 37
    assert prefill.worker.statistics().leases == 1
    link.release_nowait(handle.handle_id)
    await prefill.wait_free()


async def test_a_prompt_is_scored_with_its_token(prefill: WorkerRig, link: LegLink) -> None:
    """Each of several legs of one step gets log-probabilities of its prompt tokens from the second on."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [list(range(3, 40 + i)) for i in range(6)]
    legs = [
        Leg(leg_id=f"s{i}", task=LegTask.GENERATE, generation=replace(generation(prompt), sampling=sampling))
        for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(run_leg(link, leg, timeout_s=PATIENCE_S) for leg in legs))
    scored = [len(answer.prompt_logprobs or ()) for answer in answers]
    assert scored == [len(prompt) - 1 for prompt in prompts]
    await prefill.wait_free()


async def test_more_than_one_token_is_refused(prefill: WorkerRig, link: LegLink) -> None:
    """A leg for two tokens or without a limit is rejected. A continuation that lacks one token is accepted."""
    for tokens in (2, None):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        leg = Leg(leg_id="m", task=LegTask.GENERATE, generation=replace(generation(), sampling=sampling))
        with pytest.raises(InvalidRequestError) as caught:
            await run_leg(link, leg, timeout_s=PATIENCE_S)
        assert caught.value.field == "generation.sampling.max_tokens"
    continued = await run_leg(link, make_leg("e", tokens=3, emitted_token_ids=[5, 6]), timeout_s=PATIENCE_S)
    assert len(continued.token_ids) == 1
    await prefill.wait_free()


@pytest.mark.parametrize("ends", ["cancel", "deadline", "death"])
async def test_an_abandoned_single_token_leaves_no_leg(prefill: WorkerRig, link: LegLink, ends: str) -> None:
    """After a cancel or a deadline the worker has no leg of it. If the engine dies, the leg is lost."""
    await token(link, "first")
    running = asyncio.ensure_future(token(link, "t", 0.1 if ends == "deadline" else PATIENCE_S, prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1 or running.done(), "it is submitted")
    if ends == "cancel":
        running.cancel()
    elif ends == "death":
        prefill.engine.inject(Die())
    with pytest.raises({"cancel": asyncio.CancelledError, "deadline": DeadlineError, "death": LostError}[ends]):
        await running
    await wait_until(lambda: prefill.worker.statistics().legs == 0, "it is gone")
    if ends != "death":
        await prefill.wait_free()
        await token(link, "after")


@pytest.mark.parametrize(
    "finish",
    [
        pb.Finish(),
        pb.Finish(reason=output_pb2.FINISH_REASON_HANDED_OFF, handle={"handle_id": "h"}),  # type: ignore[arg-type]
        pb.Finish(reason=output_pb2.FINISH_REASON_ERROR),
    ],
)
def test_a_finish_against_the_contract_is_the_workers_fault(finish: pb.Finish) -> None:
    """A finish that violates the contract is an internal error, not an error of the client's request."""
    assert isinstance(from_finish(finish).error, InternalError)


async def test_unsent_handles_are_released(prefill: WorkerRig) -> None:
    """When a stream closes with finishes in its buffer, their blocks are freed immediately, long before the lease ends."""
    outlet = FrameOutlet(prefill.worker, "f1", steps_max=100, legs_max=100)
    for slot in (1, 2, 3):
        outlet.link.submit_nowait(slot, make_leg(f"r{slot}", LegTask.PREFILL, prompt=range(slot, 40)), None)
    statistics = prefill.worker.statistics
    await wait_until(lambda: (statistics().legs, statistics().leases) == (0, 3), "all finishes wait to be sent")
    outlet.close_nowait()
    assert statistics().leases == 0
    await prefill.wait_free()


async def test_many_handles_are_sent_in_several_frames(prefill: WorkerRig) -> None:
    """A handle may have up to a megabyte, and gRPC's limit for a message is 64 MB."""
    outlet = FrameOutlet(prefill.worker, "f1", steps_max=1000, legs_max=1000)
    count = 3 * RESULTS_PER_FRAME_MAX
    for slot in range(count):
        outlet.link.submit_nowait(slot, make_leg(f"r{slot}", LegTask.PREFILL), None)
    statistics = prefill.worker.statistics
    await wait_until(lambda: (statistics().legs, statistics().leases) == (0, count), "all finishes wait to be sent")
    slots: list[int] = []
    while len(slots) < count:
        finishes = outlet.take_frame().frame.finishes
        assert 1 <= len(finishes) <= RESULTS_PER_FRAME_MAX
        assert all(finish.handle.lease.seconds < 20 for finish in finishes)
        slots += [finish.slot for finish in finishes]
    assert sorted(slots) == list(range(count))
    outlet.close_nowait()
