"""Tests of both clients in kvmesh.client against a real gRPC server that can reject requests, lose them, or be slow."""

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.api.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from kvmesh.client import AsyncClient, Client, ClientSettings, Options, RetryPolicy, SamplingParams
from kvmesh.clock import SystemClock
from kvmesh.core import FinishReason
from kvmesh.errors import (
    CancelledByCallerError,
    DeadlineError,
    InvalidRequestError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import PublicRpcSettings, RpcSettings
from kvmesh.telemetry import Telemetry
from services.frontend.access.access import Access
from services.frontend.access.interceptor import AccessInterceptor
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline
from tests.certificates import Authority
from tests.frontend_mesh import (
    FakeMesh,
    Faults,
    StaticModels,
    cut_off,
    make_pipeline,
    served_model,
    tokens_of,
    write_model,
)
from tests.patience import PATIENCE_S

TEXT = "Hello! naïve 日本語 one two three"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "minProperties": 1}}}
RPC = PublicRpcSettings(connect_timeout_s=PATIENCE_S)
"""An attempt to connect that is slow on a busy machine does not count as an attempt of the call."""
# Short pauses for tests.
QUICK = ClientSettings(retry=RetryPolicy(attempts_max=3, pause_s=0.01, pause_s_max=50.0), timeout_s=100.0, rpc=RPC)


@dataclass(slots=True)
class Served:
    address: str
    mesh: FakeMesh
    pipeline: Pipeline
    text: Any
    settings: ClientSettings = field(default_factory=lambda: QUICK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


@asynccontextmanager
async def serving(
    model: ServedModel, *, rpc: RpcSettings | None = None, access: AccessSettings | None = None
) -> AsyncIterator[Served]:
    tokens = tokens_of(model.text, TEXT)
    mesh = FakeMesh(answer=lambda _: tokens)
    pipeline = make_pipeline(mesh, StaticModels([model]))
    interceptors = server_interceptors(Telemetry.create("frontend"))
    if access is not None:
        gate = Access(access, SystemClock())
        await gate.start()
        interceptors.append(AccessInterceptor(gate))
    server = RpcServer(
        rpc or RpcSettings(grace_s=0.1),
        service_names=[SERVICE_NAME],
        add_services=lambda server: add_InferenceServiceServicer_to_server(InferenceServicer(pipeline), server),
        interceptors=interceptors,
    )
    async with aclosing(server):
        await server.start()
        served = Served(address=server.address, mesh=mesh, pipeline=pipeline, text=model.text)
        yield served
    # A call that its client gave up may have begun just before the server was closed.
    await until_idle(served)
    assert not mesh.handles


@pytest.fixture
async def served(model: ServedModel) -> AsyncIterator[Served]:
    async with serving(model) as running:
        yield running


async def blocking(served: Served, work: Callable[[Client], Any], settings: ClientSettings | None = None) -> Any:
    """Runs the blocking client in a thread."""

    def run() -> Any:
        with Client(served.address, settings or served.settings, generator=random.Random(1)) as client:
            return work(client)

    return await asyncio.to_thread(run)


def connect(served: Served, settings: ClientSettings | None = None) -> AsyncClient:
    return AsyncClient(served.address, settings or served.settings, generator=random.Random(1))


async def test_unary_chat_and_generate(served: Served) -> None:
    """Both clients return the text, token ids, logprobs and usage."""
    sampling, options = SamplingParams(max_tokens=50, logprobs=1), Options(choices=2, returns_token_ids=True)
    async with connect(served) as client:
        answers = [
            await client.generate("tiny", "Hello", sampling=sampling, options=options, echoes=True),
            await blocking(
                served, lambda other: other.generate("tiny", "Hello", sampling=sampling, options=options, echoes=True)
            ),
        ]
        chats = [await client.chat("tiny", USER), await blocking(served, lambda other: other.chat("tiny", USER))]
    ids = tokens_of(served.text, TEXT)
    for answer in answers:
        assert [choice.text for choice in answer.choices] == ["Hello" + TEXT] * 2
        assert [choice.token_ids for choice in answer.choices] == [ids] * 2
        assert [len(choice.logprobs or ()) for choice in answer.choices] == [len(ids)] * 2
        assert answer.usage.output_tokens == 2 * len(ids) and answer.request_id
    for answer in chats:
        assert (answer.text, answer.choices[0].finish_reason) == (TEXT, FinishReason.STOP)


async def test_streams(served: Served) -> None:
    """The texts of the pieces add up to the whole text. Only the last piece has the usage."""
    async with connect(served) as client, client.chat_stream("tiny", USER) as stream:
        pieces = [piece async for piece in stream]
    others = await blocking(served, lambda other: list(other.generate_stream("tiny", "Hello")))
    for found in (pieces, others):
        assert "".join(piece.text for piece in found) == TEXT and len(found) > 1
        assert found[-1].usage is not None and all(piece.usage is None for piece in found[:-1])


async def test_tools_reach_the_mesh_and_calls_are_returned(served: Served) -> None:
    """Messages and tools have OpenAI's format. A schema keeps its integers and the order of its keys."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
    served.mesh.answer = lambda _: tokens_of(served.text, call)
    made = {"id": "c1", "function": {"name": "get_weather", "arguments": '{"days": 1}'}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]
    async with connect(served) as client:
        answer = await client.chat("tiny", history, tools=[TOOL])
        assert [(each.name, json.loads(each.arguments)) for each in answer.choices[0].tool_calls] == [
            ("get_weather", {"city": "Paris", "days": 2})
        ]
        assert answer.choices[0].finish_reason is FinishReason.TOOL_CALLS
        assert '{"type": "object", "minProperties": 1}' in served.text.decode(served.mesh.generations[0].token_ids)
        served.mesh.answer = lambda _: tokens_of(served.text, "<tool_call>oops</tool_call>")
        answer = await client.chat("tiny", USER, tools=[TOOL])
        assert [each.reason for each in answer.choices[0].warnings] == ["tool_call_malformed"]
        assert answer.choices[0].text == "<tool_call>oops</tool_call>"
        text = '<tool_call>oops</tool_call>\n<tool_call>\n{"name": "get_weather"'
        served.mesh.answer = lambda _: tokens_of(served.text, text)
        answer = await client.chat("tiny", USER, tools=[TOOL])
        assert [each.reason for each in answer.choices[0].warnings] == ["tool_call_malformed", "tool_call_truncated"]


async def test_tokenize_detokenize_and_models(served: Served) -> None:
    """Texts and conversations survive tokenizing and detokenizing."""
    async with connect(served) as client:
        token_ids = await client.tokenize("tiny", TEXT)
        assert await client.detokenize("tiny", token_ids) == TEXT
        templated = await client.tokenize("tiny", USER)
        assert await client.detokenize("tiny", templated) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert "<|im_start|>" not in await client.detokenize("tiny", templated, skips_special_tokens=True)
        assert [each.name for each in await client.models()] == ["tiny"]
        with pytest.raises(InvalidRequestError) as caught:
            await client.detokenize("tiny", [10**6])
        assert caught.value.field == "token_ids"
    assert await blocking(served, lambda other: other.detokenize("tiny", other.tokenize("tiny", TEXT))) == TEXT
    with pytest.raises(UnsupportedError):
        await blocking(served, lambda other: other.embed("tiny", ["x"]))


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_a_rejected_request_is_retried(served: Served, is_blocking: bool) -> None:
    """The client retries after the delay in RetryInfo, not earlier. The mesh places the request once."""
    shed = OverloadedError("full", reason="queue_full", retry_after_s=0.2)
    served.mesh.faults = Faults(place=[shed, shed])
    began_s = time.monotonic()
    if is_blocking:
        answer = await blocking(served, lambda other: other.chat("tiny", USER))
    else:
        async with connect(served) as client:
            answer = await client.chat("tiny", USER)
    assert time.monotonic() - began_s >= 0.4
    assert answer.choices[0].text == TEXT and len(served.mesh.asks) == 1


async def generated(served: Served, settings: ClientSettings, is_blocking: bool) -> Any:
    if is_blocking:
        return await blocking(served, lambda other: other.generate("tiny", "x"), settings)
    async with connect(served, settings) as client:
        return await client.generate("tiny", "x")


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_retries_are_bounded(served: Served, is_blocking: bool) -> None:
    """The number of attempts, the longest pause and the deadline limit retries. An error of the request itself is not retried."""
    hasty = ClientSettings(retry=RetryPolicy(pause_s_max=10 * PATIENCE_S), timeout_s=PATIENCE_S, rpc=RPC)
    cases: list[tuple[list[MeshError], type[MeshError], ClientSettings, int]] = [
        ([OverloadedError("full", retry_after_s=0.01)] * 5, OverloadedError, QUICK, 3),
        ([OverloadedError("full", retry_after_s=60.0)] * 5, OverloadedError, QUICK, 1),
        ([UnavailableError("none", retry_after_s=2 * PATIENCE_S)] * 5, UnavailableError, hasty, 1),
        ([NotFoundError("gone")] * 5, NotFoundError, QUICK, 1),
    ]
    for faults, kind, settings, tries in cases:
        served.mesh.faults = Faults(place=list(faults))
        with pytest.raises(kind) as caught:
            await generated(served, settings, is_blocking)
        assert len(served.mesh.faults.place) == 5 - tries, kind
        assert caught.value.retry_after_s == faults[0].retry_after_s


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_a_stream_is_not_retried_after_its_first_piece(served: Served, is_blocking: bool) -> None:
    """A stream that breaks after some pieces raises LostError."""
    served.mesh.faults = cut_off(3)
    seen: list[str] = []

    def read(client: Client) -> None:
        for piece in client.generate_stream("tiny", "x"):
            seen.append(piece.text)

    async def read_async() -> None:
        async with connect(served) as client, client.generate_stream("tiny", "x") as stream:
            async for piece in stream:
                seen.append(piece.text)

    with pytest.raises(LostError):
        await (blocking(served, read) if is_blocking else read_async())
    assert seen and TEXT.startswith("".join(seen)) and len(served.mesh.asks) == 2


async def until_idle(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while served.mesh.running or served.pipeline.in_flight:
            await asyncio.sleep(0.005)


async def test_streams_can_be_closed_and_cancelled(served: Served) -> None:
    """Closing a stream stops the request on the workers. So does cancelling it from another task or thread."""
    served.mesh.answer = lambda _: [50] * 400
    served.mesh.step_s = 0.05  # An answer takes 20 s, much longer than a thread of the test may wait for CPU time.
    sampling = SamplingParams(max_tokens=400)
    async with connect(served) as client:
        async with client.generate_stream("tiny", "x", sampling=sampling) as stream:
            await anext(stream)
        await until_idle(served)
        async with client.generate_stream("tiny", "x", sampling=sampling) as stream:
            await anext(stream)
            asyncio.get_running_loop().call_later(0.05, stream.cancel)
            with pytest.raises(CancelledByCallerError):
                async for _ in stream:
                    pass
        await until_idle(served)
        reading = asyncio.create_task(client.generate("tiny", "x", sampling=sampling))
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await until_idle(served)

    def cancelled(client: Client) -> None:
        stream = client.generate_stream("tiny", "x", sampling=sampling)
        next(stream)
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(CancelledByCallerError):
            list(stream)
        with client.generate_stream("tiny", "x", sampling=sampling) as left:
            next(left)

    await blocking(served, cancelled)
    await until_idle(served)


async def test_a_cancel_while_the_call_begins(served: Served) -> None:
    """A cancel by another thread is not lost when it comes before the stream has stored its call."""

    def read(client: Client) -> None:
        stream = client.generate_stream("tiny", "x")
        method = stream._question.method

        def begin(*arguments: Any, **options: Any) -> Any:
            call = method(*arguments, **options)
            cancelling = threading.Thread(target=stream.cancel)
            cancelling.start()
            cancelling.join()
            return call

        stream._question = replace(stream._question, method=begin)
        with pytest.raises(CancelledByCallerError):
            list(stream)

    await blocking(served, read)
    await until_idle(served)


async def test_a_cancel_ends_a_pause(served: Served) -> None:
    """A stream of the blocking client that pauses before a retry ends as soon as another thread cancels it."""
    pause_s = 10 * PATIENCE_S
    settings = ClientSettings(
        retry=RetryPolicy(attempts_max=3, pause_s=0.01, pause_s_max=pause_s), timeout_s=2 * pause_s, rpc=RPC
    )
    shed = Faults(place=[OverloadedError("full", retry_after_s=pause_s)])
    served.mesh.faults = shed
    streams: list[Any] = []

    def read(client: Client) -> None:
        streams.append(client.generate_stream("tiny", "x"))
        with pytest.raises(CancelledByCallerError):
            next(streams[0])

    reading = asyncio.create_task(blocking(served, read, settings))
    async with asyncio.timeout(PATIENCE_S):
        while shed.place or served.pipeline.in_flight:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)  # Lets the error arrive. The test also passes if the cancellation comes first.
        streams[0].cancel()
        await reading


async def test_deadlines(served: Served) -> None:
    """A call ends with DeadlineError after its own timeout."""
    served.mesh.answer = lambda _: [50] * 400
    served.mesh.step_s = 0.02
    with pytest.raises(DeadlineError):
        async with connect(served) as client:
            await client.generate("tiny", "x", sampling=SamplingParams(max_tokens=400), timeout_s=0.2)
    with pytest.raises(DeadlineError):
        await blocking(served, lambda other: other.chat("tiny", USER, timeout_s=0.2))
    await until_idle(served)


async def test_an_unreachable_server() -> None:
    """A call to an unreachable server fails with UnavailableError after a bounded number of attempts."""
    settings = ClientSettings(retry=RetryPolicy(attempts_max=2, pause_s=0.01), timeout_s=PATIENCE_S)
    async with AsyncClient("127.0.0.1:1", settings) as client:
        with pytest.raises(UnavailableError):
            await client.models()


async def test_keys_and_encryption(model: ServedModel, tmp_path: Path) -> None:
    """Each call has the key, which `repr` hides. TLS uses the configured certificate authority."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"tenant": "acme", "key_sha256": hash_of("good"), "models": ["other"]}]}))
    authority = Authority(tmp_path / "authority", "test-authority")
    pair = authority.issue("localhost", "127.0.0.1")
    rpc = PublicRpcSettings(grace_s=0.1, tls_certificate_file=pair.certificate_file, tls_key_file=pair.key_file)
    assert "good" not in repr(ClientSettings(api_key="good"))
    async with serving(model, rpc=rpc, access=AccessSettings(keys_file=str(keys))) as served:
        trusting = replace(RPC, tls_authority_file=authority.ca_file, tls_server_name="localhost")
        retry = RetryPolicy(attempts_max=1)
        with pytest.raises(UnauthenticatedError):
            async with connect(served, ClientSettings(rpc=trusting, retry=retry)) as client:
                await client.models()
        settings = ClientSettings(rpc=trusting, retry=retry, api_key="good")
        async with connect(served, settings) as client:
            assert await client.models() == []
            with pytest.raises(NotFoundError):
                await client.tokenize("tiny", "x")
        assert await blocking(served, lambda other: other.models(), settings) == []
        with pytest.raises(UnavailableError):
            async with connect(served, ClientSettings(uses_tls=True, retry=retry, timeout_s=PATIENCE_S)) as client:
                await client.models()
