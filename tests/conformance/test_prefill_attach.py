"""The promises of PrefillService.Attach, kept over grpc.aio on loopback and over MemoryNetwork."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from kvmesh.api.prefill.v1 import prefill_pb2 as pb
from kvmesh.api.prefill.v1.prefill_pb2_grpc import (
    PrefillServiceServicer,
    PrefillServiceStub,
    add_PrefillServiceServicer_to_server,
)
from kvmesh.api.types.v1.output_pb2 import FINISH_REASON_HANDED_OFF, FINISH_REASON_LENGTH, Logprobs
from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason, Role, SamplingParams, WorkerRef
from kvmesh.engines.simulated import Die, SimulatedEngine, Stall
from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, LostError, NotFoundError, UnavailableError
from kvmesh.rpc.codec.legs import fill_prefill_request, from_prefill_response
from kvmesh.rpc.codec.types import to_generation
from kvmesh.rpc.prefill_client import GrpcPrefillClient
from services.prefill.admit import PrefillAdmission
from services.prefill.stream import PrefillStream
from tests.conformance.engine_driver import EngineDriver
from tests.patience import PATIENCE_S
from tests.worker_rig import EPOCH, WorkerRig, generation, running_worker, serving, wait_until


@pytest.fixture(params=["grpc", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def prefill(kind: str) -> AsyncIterator[WorkerRig]:
    async with running_worker(kind, Role.PREFILL) as one:
        yield one


@pytest.fixture
async def client(prefill: WorkerRig) -> AsyncIterator[GrpcPrefillClient]:
    one = GrpcPrefillClient(prefill.channels, frontend_id="f1")
    yield one
    await one.aclose()


async def run(client: GrpcPrefillClient, rig: WorkerRig, name: str, timeout_s: float = PATIENCE_S, **more: Any) -> Any:
    return await client.prefill(rig.ref, request_id=name, generation=generation(**more), timeout_s=timeout_s)


async def test_calls_share_a_stream(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """Each call has its own answer, a refused one its own failure, and all of it is one link of the worker."""
    names = [f"p{i}" for i in range(20)]
    answers = await asyncio.gather(*(run(client, prefill, name) for name in names))
    assert len({answer.handle.handle_id for answer in answers}) == 20
    for wrong, error in (({"model": "another"}, NotFoundError), ({"prompt": [99_999]}, InvalidRequestError)):
        with pytest.raises(error):
            await run(client, prefill, "bad", **wrong)
    assert prefill.worker.statistics().links == 2  # This one, and that of plain calls.
    for answer in answers:
        await client.release_kv(prefill.ref, answer.handle.handle_id, timeout_s=PATIENCE_S)
    await prefill.wait_free()


async def read_to_end(stream: Any) -> None:
    """Raises how it ended unless that was well."""
    while await stream.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
async def test_who_leaves_is_cancelled(prefill: WorkerRig, client: GrpcPrefillClient, ends: str) -> None:
    """Nothing is left on the worker then, and the stream goes on."""
    await run(client, prefill, "first")
    # The engine stands still for longer than the deadline, and for long enough that the leg is seen before it.
    prefill.engine.inject(Stall(duration_s=4.0))
    timeout_s = 2.0 if ends == "deadline" else PATIENCE_S
    running = asyncio.ensure_future(run(client, prefill, "p", timeout_s, prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1 or running.done(), "it is submitted")
    if ends == "cancel":
        running.cancel()
    with pytest.raises(asyncio.CancelledError if ends == "cancel" else DeadlineError):
        await running
    await wait_until(lambda: prefill.worker.statistics().legs == 0, "it is gone")
    assert prefill.worker.statistics().leases == 1
    await run(client, prefill, "after")


async def test_a_handle_that_nobody_waits_for_goes_back(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """Callers that leave at every moment around the answer leave no lease behind."""
    first = await run(client, prefill, "first")
    await client.release_kv(prefill.ref, first.handle.handle_id, timeout_s=PATIENCE_S)
    for i in range(30):
        running = asyncio.ensure_future(run(client, prefill, f"p{i}", prompt=range(i, i + 40)))
        await asyncio.sleep(0.001 * i)
        if not running.done():
            running.cancel()
        try:
            handle = (await running).handle
        except asyncio.CancelledError:
            continue
        await client.release_kv(prefill.ref, handle.handle_id, timeout_s=PATIENCE_S)
    await prefill.wait_free()


async def test_a_stream_that_breaks_takes_its_calls_with_it(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """They fail as lost, the engine drops them, and the next call makes a new stream."""
    running = asyncio.ensure_future(run(client, prefill, "p", prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1, "it is submitted")
    await client.aclose()
    with pytest.raises(LostError):
        await running
    await prefill.wait_free()
    assert (await run(client, prefill, "again")).handle is not None


async def test_another_incarnation_is_refused(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """What was placed on a worker that is gone is not computed by its successor's cache."""
    gone = WorkerRef(worker_id="w1", address=prefill.address, epoch=EPOCH + 1)
    with pytest.raises(UnavailableError, match="anew"):
        await client.prefill(gone, request_id="p", generation=generation(), timeout_s=PATIENCE_S)


async def test_the_frontend_speaks_first(prefill: WorkerRig) -> None:
    """Anything but a Hello is refused; so are a second one, and a number that is in use."""
    call_1 = pb.Call(number=1, request=pb.PrefillRequest(request_id="a", generation=to_generation(generation())))
    hello = pb.AttachRequest(hello=pb.Hello(frontend_id="f"))
    prefill.engine.inject(Stall(duration_s=0.5))
    for messages in (
        [pb.AttachRequest(cancels=[1])],
        [hello, hello],
        [hello, pb.AttachRequest(calls=[call_1, call_1])],
    ):
        stream = PrefillServiceStub(prefill.channel).Attach()
        for message in messages:
            await stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(stream)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await prefill.wait_free()


async def test_a_worker_without_attach_gets_plain_calls(kind: str) -> None:
    """Workers of an earlier release go on serving."""

    class Plain(PrefillServiceServicer):
        async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
            return pb.PrefillResponse()

    def add(server: Any) -> None:
        add_PrefillServiceServicer_to_server(Plain(), server)  # type: ignore[abstract]

    async with serving(kind, add) as (address, channels, _):
        client = GrpcPrefillClient(channels)
        worker = WorkerRef(worker_id="old", address=address, epoch=1)
        for name in ("a", "b"):
            answer = await client.prefill(worker, request_id=name, generation=generation(), timeout_s=PATIENCE_S)
            assert answer.handle is None


async def test_a_worker_that_answers_nothing_is_given_up(kind: str) -> None:
    """A call whose worker does not answer a health check either is lost after the probe, not at its deadline."""

    class Hung(PrefillServiceServicer):
        async def Attach(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            await context.write(pb.AttachResponse(welcome=pb.Welcome(worker_id="hung", epoch=1)))
            await asyncio.Event().wait()

    def add(server: Any) -> None:
        add_PrefillServiceServicer_to_server(Hung(), server)  # type: ignore[abstract]

    async with serving(kind, add, 0.1) as (address, channels, _):
        client = GrpcPrefillClient(channels, probe_interval_s=0.1, probe_timeout_s=0.1)
        client.is_alive = _never  # type: ignore[method-assign]  # This server does answer health checks.
        worker = WorkerRef(worker_id="hung", address=address, epoch=1)
        with pytest.raises(LostError) as caught:
            await client.prefill(worker, request_id="a", generation=generation(), timeout_s=30)
        assert caught.value.reason == "worker_silent"


async def _never(worker: WorkerRef) -> bool:
    return False


async def token(
    client: GrpcPrefillClient, rig: WorkerRig, name: str, timeout_s: float = PATIENCE_S, **more: Any
) -> Any:
    """A call whose answer is wanted."""
    wanted = generation(tokens=1, **more)
    return await client.prefill(rig.ref, request_id=name, generation=wanted, timeout_s=timeout_s, wants_output=True)


async def unary(rig: WorkerRig, name: str, **fields: Any) -> pb.PrefillResponse:
    request = pb.PrefillRequest(request_id=name, **fields)
    response: pb.PrefillResponse = await PrefillServiceStub(rig.channel).Prefill(request, timeout=PATIENCE_S)
    return response


async def test_a_single_token_is_answered(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """On the stream and in plain calls the same token, among prompts that are handed out; only of those a lease is left."""
    answers = await asyncio.gather(*(token(client, prefill, f"t{i}", logprobs=2) for i in range(5)))
    handed = await run(client, prefill, "h", tokens=1)
    plain = await unary(prefill, "u", generation=to_generation(generation(tokens=1, logprobs=2)), wants_output=True)
    assert client.may_answer(prefill.ref)
    assert handed.output is None and handed.handle is not None
    alone = SimulatedEngine(prefill.engine.settings, SystemClock())
    driver = await EngineDriver(alone, PATIENCE_S).start()
    expected = await driver.run(generation(tokens=1, logprobs=2))
    await driver.aclose()
    for answer in (*answers, from_prefill_response(plain)):
        assert answer.handle is None
        assert list(answer.output.token_ids) == expected.tokens
        assert answer.output.finish.reason is FinishReason.LENGTH
        assert [entry.logprob for entry in answer.output.logprobs] == pytest.approx([expected.logprobs[0].logprob])
        assert answer.output.prompt_logprobs is None
        assert answer.usage.output_tokens == 1 and answer.usage.prompt_tokens == 37
    assert prefill.worker.statistics().leases == 1
    await client.release_kv(prefill.ref, handed.handle.handle_id, timeout_s=PATIENCE_S)
    await prefill.wait_free()


async def test_a_prompt_is_scored_with_its_token(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """One entry per prompt token from the second on, for each of many that are answered in one step."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [list(range(3, 40 + i)) for i in range(6)]
    asked = [replace(generation(prompt), sampling=sampling) for prompt in prompts]
    calls = [
        client.prefill(prefill.ref, request_id=f"s{i}", generation=each, timeout_s=PATIENCE_S, wants_output=True)
        for i, each in enumerate(asked)
    ]
    answers = await asyncio.gather(*calls)
    scored = [len(answer.output.prompt_logprobs or ()) for answer in answers if answer.output is not None]
    assert scored == [len(prompt) - 1 for prompt in prompts]
    plain = await unary(prefill, "u", generation=to_generation(asked[0]), wants_output=True)
    assert len(plain.output.prompt_logprobs.token_logprobs) == len(prompts[0]) - 1
    await prefill.wait_free()


async def test_the_output_of_more_than_one_token_is_refused(prefill: WorkerRig, client: GrpcPrefillClient) -> None:
    """And an output beside a rendezvous, and of a request without a limit; on the stream and in plain calls."""
    for tokens in (2, None):
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        more = replace(generation(), sampling=sampling)
        with pytest.raises(InvalidRequestError) as caught:
            await client.prefill(prefill.ref, request_id="m", generation=more, timeout_s=PATIENCE_S, wants_output=True)
        assert caught.value.field == "generation.sampling.max_tokens"
    both = pb.PrefillRequest(generation=to_generation(generation(tokens=1)))
    both.rendezvous.host, both.rendezvous.port, both.rendezvous.room = "127.0.0.1", 1, 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await unary(prefill, "b", generation=both.generation, rendezvous=both.rendezvous, wants_output=True)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await prefill.wait_free()


@pytest.mark.parametrize("ends", ["cancel", "deadline", "death"])
async def test_who_no_longer_wants_a_token(prefill: WorkerRig, client: GrpcPrefillClient, ends: str) -> None:
    """Nothing is left on the worker; a worker that dies loses its calls."""
    await token(client, prefill, "first")
    timeout_s = 0.1 if ends == "deadline" else PATIENCE_S
    running = asyncio.ensure_future(token(client, prefill, "t", timeout_s, prompt=[5] * 4000))
    await wait_until(lambda: prefill.worker.statistics().legs == 1 or running.done(), "it is submitted")
    if ends == "cancel":
        running.cancel()
    elif ends == "death":
        prefill.engine.inject(Die())
    with pytest.raises({"cancel": asyncio.CancelledError, "deadline": DeadlineError, "death": LostError}[ends]):
        await running
    await wait_until(lambda: prefill.worker.statistics().legs == 0, "it is gone")
    if ends != "death":
        assert prefill.engine.load().kv_blocks_used == 0
        await token(client, prefill, "after")


@pytest.mark.parametrize("says", [True, False])
async def test_a_worker_that_does_not_answer_single_tokens(kind: str, says: bool) -> None:
    """It gives a handle to who could not know yet; its Welcome, or that it has none, is believed from then on."""

    class Older(PrefillServiceServicer):
        async def Attach(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            if not says:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Attach")
            await context.write(pb.AttachResponse(welcome=pb.Welcome(worker_id="old", epoch=1)))
            async for request in requests:
                results = [pb.Result(number=call.number, response=pb.PrefillResponse()) for call in request.calls]
                await context.write(pb.AttachResponse(results=results))

        async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
            return pb.PrefillResponse()

    def add(server: Any) -> None:
        add_PrefillServiceServicer_to_server(Older(), server)  # type: ignore[abstract]

    async with serving(kind, add) as (address, channels, _):
        client = GrpcPrefillClient(channels)
        worker = WorkerRef(worker_id="old", address=address, epoch=1)
        assert client.may_answer(worker)
        wanted = generation(tokens=1)
        answer = await client.prefill(
            worker, request_id="a", generation=wanted, timeout_s=PATIENCE_S, wants_output=True
        )
        assert answer.output is None
        assert not client.may_answer(worker)
        await client.aclose()


@pytest.mark.parametrize(
    "output",
    [
        pb.Output(reason=FINISH_REASON_LENGTH),
        pb.Output(token_ids=[1, 2], reason=FINISH_REASON_LENGTH),
        pb.Output(token_ids=[1]),
        pb.Output(token_ids=[1], reason=FINISH_REASON_HANDED_OFF),
        pb.Output(token_ids=[1], reason=FINISH_REASON_LENGTH, logprobs=Logprobs(token_logprobs=[-1.0])),
    ],
)
def test_an_output_against_the_contract_is_the_workers_fault(output: pb.Output) -> None:
    """The client's request is not blamed for it."""
    with pytest.raises(InternalError):
        from_prefill_response(pb.PrefillResponse(output=output))


async def test_results_that_were_not_told_give_their_handles_back(prefill: WorkerRig) -> None:
    """A link that closes with results in its buffer: their blocks are free at once, long before the lease ends."""
    stream = PrefillStream(prefill.worker, PrefillAdmission(waiting_prompt_tokens_max=0), SystemClock(), "f1")
    message = pb.AttachRequest()
    for number in (1, 2, 3):
        fill_prefill_request(
            message.calls.add(number=number).request, f"r{number}", generation(prompt=range(number, 40)), None, "v"
        )
    stream.take(message)
    statistics = prefill.worker.statistics
    await wait_until(lambda: (statistics().legs, statistics().leases) == (0, 3), "all results wait to be sent")
    stream.close_nowait()
    assert prefill.worker.statistics().leases == 0
    await prefill.wait_free()
