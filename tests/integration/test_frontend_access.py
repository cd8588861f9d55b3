"""Access control on loopback: API keys, quotas, CORS, TLS, keep-alive, and accounting of usage."""

import asyncio
import json
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from kvmesh.clock import Clock, SystemClock
from kvmesh.core import ReportKind
from kvmesh.errors import (
    InvalidRequestError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnauthenticatedError,
)
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.status import from_rpc_error
from kvmesh.simulation.registry import MemoryAgent, MemoryRegistry
from kvmesh.telemetry import Instruments, Telemetry
from services.frontend.access import access as access_control
from services.frontend.access.access import Access
from services.frontend.access.interceptor import AccessInterceptor
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.api.http.server import HttpServer
from services.frontend.metrics import FrontendMetrics
from services.frontend.models import ServedModel
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import HttpSettings, PipelineSettings
from tests.certificates import Authority
from tests.conformance.manual_clock import ManualClock
from tests.frontend_mesh import FakeMesh, Faults, StaticModels, served_model, tokens_of, write_model
from tests.patience import PATIENCE_S

TEXT = "Hello! one two three"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")), adapters=("tiny-lora",))


def write_keys(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text(json.dumps({"keys": [{"tenant": "acme", **each} for each in rows]}))


@asynccontextmanager
async def frontend(
    model: ServedModel, mesh: FakeMesh | None = None, *, access: AccessSettings | None = None,
    registry: Any = None, http: HttpSettings | None = None, access_clock: Clock | None = None,
) -> AsyncIterator[tuple[str, Pipeline, CollectorRegistry]]:  # fmt: skip
    tokens = tokens_of(model.text, TEXT)
    mesh = mesh or FakeMesh(answer=lambda _: tokens)
    metrics = CollectorRegistry()
    instruments = Instruments(metrics, "frontend")
    clock = SystemClock()
    gate = Access(access or AccessSettings(), access_clock or clock, instruments=instruments, registry=registry)
    await gate.start()
    pipeline = Pipeline(
        models=StaticModels([model]), links=mesh, router=mesh, clock=clock, generator=random.Random(3),
        metrics=FrontendMetrics(instruments, lambda: 0.0), settings=PipelineSettings(), access=gate,
    )  # fmt: skip
    server = HttpServer(pipeline, replace(http or HttpSettings(), port=0), metrics)
    await server.start()
    following = asyncio.create_task(gate.run())
    scheme = "https" if http is not None and http.tls_certificate_file else "http"
    try:
        yield f"{scheme}://127.0.0.1:{server.port}", pipeline, metrics
    finally:
        following.cancel()
        await asyncio.wait([following])
        await server.aclose()


async def post(session: aiohttp.ClientSession, url: str, body: Any = BODY, **headers: str) -> tuple[int, Any, Any]:
    async with session.post(url + CHAT, json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def test_requests_need_a_valid_key(model: ServedModel, tmp_path: Path) -> None:
    """Without a key or with a wrong one, requests get a 401. Both headers for keys work. Health checks and metrics need no key."""
    write_keys(tmp_path / "keys.json", {"key_sha256": hash_of("good")})
    async with (
        frontend(model, access=AccessSettings(keys_file=str(tmp_path / "keys.json"))) as (url, _, metrics),
        aiohttp.ClientSession() as session,
    ):
        assert [(await post(session, url, Authorization=value))[0] for value in ("", "Bearer bad", "good")] == [401] * 3
        status, body, headers = await post(session, url, Authorization="Bearer bad")
        assert headers["WWW-Authenticate"] == "Bearer"
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            401,
            "authentication_error",
            "invalid_api_key",
        )
        assert (await post(session, url, Authorization="Bearer good"))[0] == 200
        assert (await post(session, url, **{"x-api-key": "good"}))[0] == 200
        for path, status in (
            ("/live", 200),
            ("/version", 200),
            ("/health", 200),
            ("/metrics", 200),
            ("/v1/models", 401),
        ):
            async with session.get(url + path) as response:
                assert response.status == status
        assert (
            'kvmesh_frontend_refused_requests_total{reason="invalid_api_key"} 2.0' in generate_latest(metrics).decode()
        )
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="good", max_retries=0) as client:
            assert [each.id async for each in client.models.list()] == ["tiny", "tiny-lora"]


async def test_a_key_is_limited_to_its_models(model: ServedModel, tmp_path: Path) -> None:
    """For a key, models that it may not use do not exist. Its priority is limited too."""
    write_keys(tmp_path / "keys.json", {"key_sha256": hash_of("k"), "models": ["tiny-lora"], "priority_max": 0})
    async with (
        frontend(model, access=AccessSettings(keys_file=str(tmp_path / "keys.json"))) as (url, _, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        assert [each.id async for each in client.models.list()] == ["tiny-lora"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**BODY)  # type: ignore[call-overload]
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("tiny")
        lora = {**BODY, "model": "tiny-lora"}
        await client.chat.completions.create(**lora)  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError, match="priority"):
            await client.chat.completions.create(**lora, extra_body={"priority": 5})  # type: ignore[call-overload]


async def test_keys_change_without_a_restart_and_a_bad_document_changes_nothing(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """During a rotation the old key works until it is removed from the list, also while the list is malformed."""
    path = tmp_path / "keys.json"
    write_keys(path, {"key_sha256": hash_of("old")})
    monkeypatch.setattr(access_control, "RELOAD_INTERVAL_S", 0.1)
    settings = AccessSettings(keys_file=str(path))
    async with frontend(model, access=settings) as (url, _, _), aiohttp.ClientSession() as session:

        async def works(key: str) -> bool:
            return (await post(session, url, Authorization=f"Bearer {key}"))[0] == 200

        assert (await works("old"), await works("new")) == (True, False)
        path.write_text('{"keys": [')
        async with asyncio.timeout(PATIENCE_S):
            while "keys_not_reloaded" not in caplog.text:
                await asyncio.sleep(0.05)
        assert await works("old")
        write_keys(path, {"key_sha256": hash_of("new")})
        async with asyncio.timeout(PATIENCE_S):
            while not await works("new"):
                await asyncio.sleep(0.05)
        assert not await works("old")


async def test_keys_can_come_from_the_registry(model: ServedModel) -> None:
    """The same document can be a value in Consul KV. If it is missing, the start fails."""
    agent = MemoryAgent()
    registry = MemoryRegistry(agent)
    settings = AccessSettings(keys_consul_key="kvmesh/keys")
    with pytest.raises(InvalidRequestError, match="kvmesh/keys"):
        async with frontend(model, access=settings, registry=registry):
            pass
    document = {"keys": [{"tenant": "acme", "key_sha256": hash_of("k")}]}
    await registry.put("kvmesh/keys", json.dumps(document).encode())
    async with frontend(model, access=settings, registry=registry) as (url, _, _), aiohttp.ClientSession() as session:
        assert (await post(session, url, Authorization="Bearer k"))[0] == 200


async def test_quotas_give_429_with_a_time_and_refund_unused_tokens(model: ServedModel, tmp_path: Path) -> None:
    """A request over the quota of tokens gets a 429 with Retry-After. Afterwards the account is charged only for the tokens used."""
    write_keys(tmp_path / "keys.json", {"key_sha256": hash_of("k"), "tokens_per_minute": 100})
    is_refused = asyncio.Event()
    mesh = FakeMesh(answer=lambda _: tokens_of(model.text, TEXT), before_step=lambda _, sent: is_refused.wait())
    access, clock = AccessSettings(keys_file=str(tmp_path / "keys.json")), ManualClock()
    async with (
        frontend(model, mesh, access=access, access_clock=clock) as (url, pipeline, _),
        aiohttp.ClientSession() as session,
    ):
        asking = [asyncio.create_task(post(session, url, Authorization="Bearer k")) for _ in range(2)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        is_refused.set()
        first = await asyncio.gather(*asking)
        assert sorted(status for status, _, _ in first) == [200, 429]
        refused = next(each for each in first if each[0] == 429)
        assert int(refused[2]["Retry-After"]) >= 1
        assert refused[1]["error"]["code"] == "tokens_quota"
        used = next(body for status, body, _ in first if status == 200)["usage"]["total_tokens"]
        account = pipeline.access.quotas._accounts["acme"]
        assert account.tokens is not None
        assert account.tokens.level(clock.now()) == 100 - used
        assert account.in_flight == 0


async def test_a_request_is_accounted_once_however_it_ends(
    model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests placed twice after a lost prefill or a lost answer, and cancelled ones, each have one usage record with the tokens that were
    output."""
    tokens = tokens_of(model.text, TEXT)
    write_keys(tmp_path / "keys.json", {"key_sha256": hash_of("k")})
    access = AccessSettings(keys_file=str(tmp_path / "keys.json"))
    twice = FakeMesh(answer=lambda _: tokens, faults=Faults(prefill=[LostError("gone")]))
    broken = FakeMesh(answer=lambda _: tokens, faults=Faults(leg_after=3, leg_error=LostError("gone")))
    stalled = FakeMesh(answer=lambda _: tokens, faults=Faults(stalls_after=2))
    lines: list[dict[str, Any]] = []
    for mesh in (twice, broken, stalled):
        caplog.clear()
        async with frontend(model, mesh, access=access) as (url, pipeline, metrics), aiohttp.ClientSession() as session:
            with caplog.at_level(logging.INFO):
                asking = asyncio.create_task(post(session, url, Authorization="Bearer k"))
                async with asyncio.timeout(PATIENCE_S):
                    while not (asking.done() or mesh.stalled):
                        await asyncio.sleep(0.01)
                    asking.cancel()
                    await asyncio.wait([asking])
                    while pipeline.in_flight:
                        await asyncio.sleep(0.01)
            found = [record.data for record in caplog.records if record.message == "usage"]  # type: ignore[attr-defined]
            assert len(found) == 1
            lines += found
            counted = f'usage_tokens_total{{kind="output",model="tiny"}} {float(found[0]["output_tokens"])}'
            assert counted in generate_latest(metrics).decode()
    assert [line["output_tokens"] for line in lines] == [len(tokens), len(tokens), 2]
    assert {line["tenant"] for line in lines} == {"acme"}
    assert {line["prompt_tokens"] for line in lines} == {lines[0]["prompt_tokens"]}


async def test_allowed_origins_get_cors_headers(model: ServedModel) -> None:
    """Preflights and answers, whole and streamed, have CORS headers for an allowed origin, and none for another."""
    http = HttpSettings(cors_origins=("https://app.example",))
    async with frontend(model, http=http) as (url, _, _), aiohttp.ClientSession() as session:
        for origin, allowed in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
            ask = {"Origin": origin, "Access-Control-Request-Headers": "authorization"}
            async with session.options(url + CHAT, headers=ask) as response:
                assert (response.status, response.headers.get("Access-Control-Allow-Origin")) == (204, allowed)
            for body in (BODY, {**BODY, "stream": True}):
                async with session.post(url + CHAT, json=body, headers={"Origin": origin}) as response:
                    assert response.headers.get("Access-Control-Allow-Origin") == allowed
                    exposed = response.headers.get("Access-Control-Expose-Headers", "").split(", ")
                    assert ({"x-request-id", "retry-after", "x-kvmesh-warning"} <= set(exposed)) == bool(allowed)
    async with frontend(model) as (url, _, _), aiohttp.ClientSession() as session:
        async with session.options(url + CHAT, headers={"Origin": "https://app.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_tls_and_mutual_tls(model: ServedModel, tmp_path: Path) -> None:
    """The API works over TLS, streams included. With a configured authority, clients need one of its certificates."""
    authority = Authority(tmp_path / "ca", "test authority")
    server, client = authority.issue("server", "127.0.0.1"), authority.issue("client")
    for authority_file in ("", authority.ca_file):
        http = HttpSettings(
            tls_certificate_file=server.certificate_file,
            tls_key_file=server.key_file,
            tls_authority_file=authority_file,
        )
        context = ssl.create_default_context(cafile=authority.ca_file)
        async with frontend(model, http=http) as (url, _, _):
            if authority_file:
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                    with pytest.raises(aiohttp.ClientError):
                        await post(session, url)
                context = ssl.create_default_context(cafile=authority.ca_file)
                context.load_cert_chain(client.certificate_file, client.key_file)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                assert (await post(session, url))[1]["choices"][0]["message"]["content"] == TEXT
                async with session.post(url + CHAT, json={**BODY, "stream": True}) as response:
                    assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_closing_a_tls_connection_cancels_its_request(model: ServedModel, tmp_path: Path) -> None:
    """The event loop cannot keep a TLS connection half open, so the request is cancelled when the client shuts down its side."""
    authority = Authority(tmp_path / "ca", "test authority")
    server = authority.issue("server", "127.0.0.1")
    http = HttpSettings(tls_certificate_file=server.certificate_file, tls_key_file=server.key_file)
    context = ssl.create_default_context(cafile=authority.ca_file)
    mesh = FakeMesh(answer=lambda _: [50] * 400, step_s=0.05)
    body = json.dumps({**BODY, "max_tokens": 400}).encode()
    request = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    async with frontend(model, mesh, http=http) as (url, pipeline, _), asyncio.timeout(PATIENCE_S):
        port = int(url.rpartition(":")[2])

        def ask() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port))
            wrapped = context.wrap_socket(connection, server_hostname="127.0.0.1")
            wrapped.sendall(request)
            return wrapped

        connection = await asyncio.to_thread(ask)
        while not mesh.running:
            await asyncio.sleep(0.005)
        connection.shutdown(socket.SHUT_WR)
        while pipeline.in_flight:
            await asyncio.sleep(0.005)
        assert mesh.settled() == [(1, ReportKind.CANCELLED)]
        connection.close()


async def test_a_silent_stream_is_kept_alive_with_comments(model: ServedModel) -> None:
    """The stream has comments before the first token and between tokens. SSE clients ignore them."""
    tokens = tokens_of(model.text, TEXT)
    comments: asyncio.Queue[bytes] = asyncio.Queue()
    mesh = FakeMesh(answer=lambda _: tokens, before_step=lambda _, sent: comments.get())
    async with frontend(model, mesh, http=HttpSettings(keep_alive_s=0.02)) as (url, _, _):
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
            async with session.post(url + CHAT, json={**BODY, "stream": True}) as response:
                # Each token comes after another comment.
                lines = []
                async for line in response.content:
                    lines.append(line)
                    if line == b": keep-alive\n":
                        comments.put_nowait(line)
        assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
        mesh.before_step, mesh.step_s = None, 0.1
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(**BODY, stream=True)  # type: ignore[call-overload]
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == TEXT


async def test_grpc_calls_use_the_same_keys(model: ServedModel, tmp_path: Path) -> None:
    """Calls get UNAUTHENTICATED, NOT_FOUND, or RESOURCE_EXHAUSTED with a time to retry. Health checks need no key."""
    write_keys(tmp_path / "keys.json", {"key_sha256": hash_of("k"), "requests_per_minute": 2, "models": ["tiny"]})
    access = AccessSettings(keys_file=str(tmp_path / "keys.json"))
    async with frontend(model, access=access, access_clock=ManualClock()) as (_, pipeline, _):
        server = RpcServer(
            RpcSettings(grace_s=0.1),
            service_names=[SERVICE_NAME],
            add_services=lambda server: add_InferenceServiceServicer_to_server(InferenceServicer(pipeline), server),
            interceptors=[*server_interceptors(Telemetry.create("frontend")), AccessInterceptor(pipeline.access)],
        )
        await server.start()
        await server.set_serving(True)
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                stub: Any = InferenceServiceStub(channel)

                async def ask(key: str = "", model: str = "tiny") -> MeshError | str:
                    metadata = [("authorization", f"Bearer {key}")] if key else []
                    call = stub.Generate(pb.GenerateRequest(model=model, text="Hi"), metadata=metadata)
                    try:
                        return "".join([response.text async for response in call])
                    except grpc.aio.AioRpcError as error:
                        return from_rpc_error(error)

                assert isinstance(await ask(), UnauthenticatedError)
                assert isinstance(await ask("bad"), UnauthenticatedError)
                assert isinstance(await ask("k", "tiny-lora"), NotFoundError)
                assert await ask("k") == TEXT
                refused = await ask("k")
                assert isinstance(refused, OverloadedError)
                assert refused.retry_after_s == pytest.approx(30)
                health = health_pb2_grpc.HealthStub(channel)
                assert (
                    await health.Check(health_pb2.HealthCheckRequest())
                ).status == health_pb2.HealthCheckResponse.SERVING
        finally:
            await server.aclose()
