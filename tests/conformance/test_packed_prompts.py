"""Prompts as packed words: only to workers that announce it, and the same answer in either form, whoever is the older one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from kvmesh.api.decode.v1 import decode_pb2
from kvmesh.api.decode.v1.decode_pb2_grpc import (
    DecodeServiceServicer,
    DecodeServiceStub,
    add_DecodeServiceServicer_to_server,
)
from kvmesh.api.prefill.v1 import prefill_pb2
from kvmesh.api.prefill.v1.prefill_pb2_grpc import (
    PrefillServiceServicer,
    PrefillServiceStub,
    add_PrefillServiceServicer_to_server,
)
from kvmesh.api.types.v1 import prompt_pb2
from kvmesh.clock import SystemClock
from kvmesh.core import Role, TokenLogprob, WorkerRef
from kvmesh.errors import InvalidRequestError, MeshError
from kvmesh.kv.blocks import pack_tokens
from kvmesh.rpc.clients import DecodeLeg, LegFinish
from kvmesh.rpc.codec.scalars import to_duration
from kvmesh.rpc.codec.types import to_generation
from kvmesh.rpc.decode_link import GrpcDecodeLinks
from kvmesh.rpc.prefill_client import GrpcPrefillClient
from kvmesh.rpc.status import from_rpc_error
from tests.patience import PATIENCE_S
from tests.worker_rig import EPOCH, generation, running_worker, serving, wait_until

PROMPT = tuple(range(3, 103))


@pytest.fixture(params=["grpc", "memory"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Sink:
    """One leg's tokens and its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: LegFinish | None = None

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, came_s: float) -> None:
        self.tokens += token_ids

    def on_prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        raise AssertionError("nobody asked for them")

    def on_finish(self, finish: LegFinish) -> None:
        self.finish = finish


class ListeningPrefill(PrefillServiceServicer):
    """Notes what comes and answers it; `welcome` says what it announces."""

    def __init__(self, **welcome: Any) -> None:
        self.heard: list[prompt_pb2.Generation] = []
        self._welcome = prefill_pb2.Welcome(worker_id="w1", epoch=EPOCH, **welcome)

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(prefill_pb2.AttachResponse(welcome=self._welcome))
        async for request in request_iterator:
            for call in request.calls:
                self.heard.append(call.request.generation)
                result = prefill_pb2.Result(number=call.number, response=prefill_pb2.PrefillResponse())
                await context.write(prefill_pb2.AttachResponse(results=[result]))


class ListeningDecode(DecodeServiceServicer):
    """Notes what is submitted and never answers; `welcome` says what it announces."""

    def __init__(self, **welcome: Any) -> None:
        self.heard: list[prompt_pb2.Generation] = []
        self._welcome = decode_pb2.Welcome(
            worker_id="w1", epoch=EPOCH, heartbeat=to_duration(60), submissions_max=9, **welcome
        )

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(decode_pb2.AttachResponse(welcome=self._welcome))
        async for request in request_iterator:
            self.heard += [submission.generation for submission in request.submissions]


@pytest.mark.parametrize("announced", [{}, {"takes_packed_token_ids": True}], ids=["older", "newer"])
async def test_only_who_announces_it_gets_packed_prompts(kind: str, announced: dict[str, bool]) -> None:
    """A worker of an earlier release would take a packed prompt for an empty one."""
    prefill = ListeningPrefill(**announced)  # type: ignore[abstract]
    decode = ListeningDecode(**announced)  # type: ignore[abstract]

    def add(server: Any) -> None:
        add_PrefillServiceServicer_to_server(prefill, server)
        add_DecodeServiceServicer_to_server(decode, server)

    async with serving(kind, add, 0.1) as (address, channels, _):
        worker = WorkerRef(worker_id="w1", address=address, epoch=EPOCH)
        client = GrpcPrefillClient(channels, frontend_id="f1")
        # What is said before the Welcome is said as every worker understands it.
        for name in ("before", "after"):
            await client.prefill(worker, request_id=name, generation=generation(PROMPT), timeout_s=PATIENCE_S)
        links = GrpcDecodeLinks(channels, frontend_id="f1", clock=SystemClock())
        link = await links.link(worker, timeout_s=PATIENCE_S)
        link.submit_nowait(DecodeLeg(request_id="r", generation=generation(PROMPT), timeout_s=PATIENCE_S), Sink())
        await wait_until(lambda: bool(decode.heard), "it is submitted")
        await links.aclose()
        await client.aclose()
    plain, *later = (*prefill.heard, *decode.heard)
    assert list(plain.token_ids) == list(PROMPT) and not plain.packed_token_ids
    for heard in later:
        packed = pack_tokens(PROMPT) if announced else b""
        assert (list(heard.token_ids), heard.packed_token_ids) == ([] if announced else list(PROMPT), packed)


def prompt_message(form: str) -> prompt_pb2.Generation:
    """The same request in either form."""
    return to_generation(generation(PROMPT, tokens=9), packs_tokens=form == "packed")


async def test_the_answer_is_the_same_in_either_form(kind: str) -> None:
    """Through the link, which packs, and in calls of frontends that do or do not."""
    async with running_worker(kind) as rig:
        links, sink = GrpcDecodeLinks(rig.channels, frontend_id="f1", clock=SystemClock()), Sink()
        link = await links.link(rig.ref, timeout_s=PATIENCE_S)
        link.submit_nowait(
            DecodeLeg(request_id="r", generation=generation(PROMPT, tokens=9), timeout_s=PATIENCE_S), sink
        )
        await wait_until(lambda: sink.finish is not None, "it is done")
        answers = [sink.tokens]
        for form in ("plain", "packed"):
            request = decode_pb2.GenerateRequest(generation=prompt_message(form))
            responses = [each async for each in DecodeServiceStub(rig.channel).Generate(request)]
            answers.append([token_id for each in responses for token_id in each.token_ids])
            assert responses[-1].finish.usage.prompt_tokens == len(PROMPT)
        await links.aclose()
    assert len(answers[0]) == 9 and answers[0] == answers[1] == answers[2]


async def test_the_prefill_worker_finds_one_form_cached_in_the_other(kind: str) -> None:
    """They are the same blocks, and the same number of tokens."""
    async with running_worker(kind, Role.PREFILL) as rig:
        client = GrpcPrefillClient(rig.channels, frontend_id="f1")
        stub = PrefillServiceStub(rig.channel)
        usages: list[tuple[int, int]] = []
        for form in ("plain", "packed"):
            request = prefill_pb2.PrefillRequest(request_id=form, generation=prompt_message(form))
            usage = (await stub.Prefill(request)).usage
            usages.append((usage.prompt_tokens, usage.cached_tokens))
        for name in ("a", "b"):
            given = await client.prefill(rig.ref, request_id=name, generation=generation(PROMPT), timeout_s=PATIENCE_S)
            usages.append((given.usage.prompt_tokens, given.usage.cached_tokens))
        await client.aclose()
    assert usages[0] == (len(PROMPT), 0) and usages[1][1] > 0
    assert usages[1:] == [usages[1]] * 3


FAULTS = [
    (b"\x05\0\0\0", [5], "generation.packed_token_ids"),
    (b"\x05\0\0\0\x05", [], "generation.packed_token_ids"),
    (b"\x05", [], "generation.packed_token_ids"),
    (pack_tokens([5, 99_999]), [], "generation.token_ids"),
    (b"", [], "generation.token_ids"),
]


@asynccontextmanager
async def both(kind: str) -> AsyncIterator[tuple[Any, Any]]:
    """A worker of each role, as plain clients call them."""
    async with running_worker(kind) as decode, running_worker(kind, Role.PREFILL) as prefill:
        yield DecodeServiceStub(decode.channel), PrefillServiceStub(prefill.channel)


async def refusal(call: Any) -> MeshError:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return from_rpc_error(caught.value)


async def test_a_packed_prompt_that_is_none_is_refused_by_name(kind: str) -> None:
    """Both forms at once, a word cut off, an id beyond the vocabulary, nothing: in calls and on streams."""
    async with both(kind) as (decode, prefill):
        for packed, plain, field in FAULTS:
            bad = prompt_message("plain")
            bad.packed_token_ids = packed
            del bad.token_ids[:]
            bad.token_ids.extend(plain)
            stream = decode.Attach()
            await stream.write(decode_pb2.AttachRequest(hello=decode_pb2.Hello(frontend_id="f1")))
            await stream.read()
            submission = decode_pb2.Submission(slot=0, request_id="s", generation=bad)
            await stream.write(decode_pb2.AttachRequest(submissions=[submission]))
            (finish,) = (await stream.read()).frame.finishes
            stream.cancel()
            fields = [
                finish.error.field,
                (await refusal(decode.Generate(decode_pb2.GenerateRequest(generation=bad)).read())).field,
                (await refusal(prefill.Prefill(prefill_pb2.PrefillRequest(request_id="p", generation=bad)))).field,
            ]
            assert fields == [field] * 3


async def test_a_refused_packed_prompt_is_its_callers_alone(kind: str) -> None:
    """On a shared stream the others go on."""
    async with running_worker(kind, Role.PREFILL) as rig:
        client = GrpcPrefillClient(rig.channels, frontend_id="f1")
        await client.prefill(rig.ref, request_id="first", generation=generation(PROMPT), timeout_s=PATIENCE_S)
        good, bad = await asyncio.gather(
            client.prefill(rig.ref, request_id="good", generation=generation(PROMPT), timeout_s=PATIENCE_S),
            client.prefill(rig.ref, request_id="bad", generation=generation([99_999]), timeout_s=PATIENCE_S),
            return_exceptions=True,
        )
        await client.aclose()
    assert isinstance(bad, InvalidRequestError) and not isinstance(good, BaseException)
