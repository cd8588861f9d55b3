"""Batches over gRPC use the same store as batches over HTTP, and belong to tenants."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from kvmesh.client import AsyncClient, Batch, BatchAnswer, Client, ClientSettings, RetryPolicy
from kvmesh.clock import SystemClock
from kvmesh.core import Ask
from kvmesh.errors import (
    DeadlineError,
    InvalidRequestError,
    LostError,
    MeshError,
    NotFoundError,
    UnauthenticatedError,
    UnsupportedError,
)
from kvmesh.rpc.clients import Placed
from kvmesh.rpc.interceptors import server_interceptors
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.settings import RpcSettings
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import Telemetry
from services.frontend.access.access import Access
from services.frontend.access.interceptor import AccessInterceptor
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.api.grpc.servicer import SERVICE_NAME, InferenceServicer
from services.frontend.models import ServedModel
from tests.frontend_apps import RunningApps, running_apps
from tests.frontend_mesh import FakeMesh, served_model, tokens_of, write_model
from tests.patience import PATIENCE_S
from tests.worker_rig import wait_until

CHAT = pb.BATCH_ENDPOINT_CHAT_COMPLETIONS
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20})
BAD = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 9})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


@asynccontextmanager
async def served(
    model: ServedModel, directory: Path, *, keys: Path | None = None
) -> AsyncIterator[tuple[Any, RunningApps]]:
    async with (
        listening(model, directory, keys=keys) as (address, apps),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield InferenceServiceStub(channel), apps


@asynccontextmanager
async def listening(
    model: ServedModel, directory: Path, *, keys: Path | None = None
) -> AsyncIterator[tuple[str, RunningApps]]:
    tokens = tokens_of(model.text, "Hello! one two")
    mesh = FakeMesh(answer=lambda _: tokens)
    async with running_apps([model], mesh, directory) as apps:
        gate = Access(AccessSettings(keys_file=str(keys or "")), SystemClock())
        await gate.start()
        apps.pipeline.access = gate
        servicer = InferenceServicer(apps.pipeline, lambda: apps.batches.service)
        server = RpcServer(
            RpcSettings(grace_s=0.1),
            service_names=[SERVICE_NAME],
            add_services=lambda server: add_InferenceServiceServicer_to_server(servicer, server),
            interceptors=[*server_interceptors(Telemetry.create("frontend")), AccessInterceptor(gate)],
        )
        async with aclosing(server):
            await server.start()
            yield server.address, apps


def lines(*bodies: str) -> pb.BatchLines:
    return pb.BatchLines(lines=[pb.BatchLine(custom_id=f"c{i}", body=body) for i, body in enumerate(bodies)])


async def ended(stub: Any, batch_id: str, **kwargs: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = (await stub.GetBatch(pb.GetBatchRequest(batch_id=batch_id), **kwargs)).batch
            if batch.status in (pb.BATCH_STATUS_COMPLETED, pb.BATCH_STATUS_FAILED, pb.BATCH_STATUS_CANCELLED):
                return batch
            await asyncio.sleep(0.02)


def hold_placements(mesh: FakeMesh, *, after: int = 0) -> asyncio.Event:
    """Places `after` more requests, and the others when the returned event is set, so that their batch cannot end before."""
    place, release, placed = mesh.place, asyncio.Event(), len(mesh.asks)

    async def hold(ask: Ask, *, timeout_s: float) -> Placed:
        if len(mesh.asks) >= placed + after:
            await release.wait()
        return await place(ask, timeout_s=timeout_s)

    mesh.place = hold  # type: ignore[method-assign]
    return release


async def drained(call: Any) -> Any:
    return [each async for each in call] if hasattr(call, "__aiter__") else await call


async def failure(call: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drained(call)
    return from_rpc_error(caught.value)


async def test_a_batch_runs_every_line(model: ServedModel, tmp_path: Path) -> None:
    """Each line has one result with its status. The batch has counts, tokens and times, and is visible over HTTP."""
    async with served(model, tmp_path) as (stub, apps):
        release = hold_placements(apps.mesh)
        request = pb.CreateBatchRequest(
            endpoint=CHAT, lines=lines(BODY, BAD, BODY), metadata={"job": "7"}, completion_window=Duration(seconds=3600)
        )
        made = (await stub.CreateBatch(request)).batch
        assert (made.status, dict(made.metadata)) == (pb.BATCH_STATUS_VALIDATING, {"job": "7"})
        assert made.expires_at.seconds - made.created_at.seconds == 3600
        error = await failure(stub.ListBatchResults(pb.ListBatchResultsRequest(batch_id=made.id)))
        assert isinstance(error, UnsupportedError) and error.reason == "batch_not_ended"
        release.set()
        batch = await ended(stub, made.id)
        assert (batch.status, batch.lines_total, batch.lines_completed, batch.lines_failed) == (
            pb.BATCH_STATUS_COMPLETED, 3, 2, 1,
        )  # fmt: skip
        assert batch.usage.output_tokens > 0
        results = {
            each.custom_id: each async for each in stub.ListBatchResults(pb.ListBatchResultsRequest(batch_id=made.id))
        }
        assert {name: each.status_code for name, each in results.items()} == {"c0": 200, "c1": 400, "c2": 200}
        assert json.loads(results["c0"].body)["choices"][0]["message"]["content"] == "Hello! one two"
        assert json.loads(results["c1"].body)["error"]["param"] == "temperature"
        status, body, _ = await apps.call("GET", f"/v1/batches/{made.id}")
        assert (status, body["status"], body["completion_window"]) == (200, "completed", "1h")
        listed = await stub.ListBatches(pb.ListBatchesRequest(page_size=1))
        assert ([each.id for each in listed.batches], listed.has_more) == ([made.id], False)
        error = await failure(stub.CancelBatch(pb.CancelBatchRequest(batch_id=made.id)))
        assert isinstance(error, InvalidRequestError) and error.reason == "batch_ended"


async def test_a_batch_is_cancelled(model: ServedModel, tmp_path: Path) -> None:
    """Requests that did not run have a result without a status code, whose error says that the batch was cancelled."""
    async with served(model, tmp_path) as (stub, apps):
        hold_placements(apps.mesh, after=3)
        made = (await stub.CreateBatch(pb.CreateBatchRequest(endpoint=CHAT, lines=lines(*[BODY] * 40)))).batch
        await wait_until(lambda: len(apps.mesh.settled()) == 3, "three requests end")
        cancelled = (await stub.CancelBatch(pb.CancelBatchRequest(batch_id=made.id))).batch
        assert cancelled.status in (pb.BATCH_STATUS_CANCELLING, pb.BATCH_STATUS_CANCELLED)
        assert (await ended(stub, made.id)).status == pb.BATCH_STATUS_CANCELLED
        results = [each async for each in stub.ListBatchResults(pb.ListBatchResultsRequest(batch_id=made.id))]
        assert len(results) == 40
        unrun = [each for each in results if each.status_code == 0]
        assert len(unrun) >= 37 and json.loads(unrun[0].body)["error"]["code"] == "batch_cancelled"


async def test_problems_are_reported_by_field(model: ServedModel, tmp_path: Path) -> None:
    """Problems that appear only when the lines are read are in the batch."""
    create = pb.CreateBatchRequest
    cases: list[tuple[Any, type[MeshError], str]] = [
        (create(lines=lines(BODY)), InvalidRequestError, "endpoint"),
        (create(endpoint=CHAT), InvalidRequestError, "input"),
        (create(endpoint=CHAT, lines=pb.BatchLines()), InvalidRequestError, "lines.lines"),
        (create(endpoint=CHAT, lines=lines("[1]")), InvalidRequestError, "lines.lines[0].body"),
        (create(endpoint=CHAT, lines=lines(BODY, "{")), InvalidRequestError, "lines.lines[1].body"),
        (create(endpoint=CHAT, lines=pb.BatchLines(lines=[pb.BatchLine(body=BODY)])), InvalidRequestError,
         "lines.lines[0].custom_id"),
        (create(endpoint=CHAT, input_file_id="nope"), InvalidRequestError, "input_file_id"),
        (create(endpoint=CHAT, input_file_id="file-" + "0" * 32), NotFoundError, "input_file_id"),
        (create(endpoint=CHAT, lines=lines(BODY), completion_window=Duration(nanos=5)), InvalidRequestError,
         "completion_window"),
        (create(endpoint=CHAT, lines=lines(BODY), metadata={"k": "v" * 513}), InvalidRequestError, "metadata"),
    ]  # fmt: skip
    async with served(model, tmp_path) as (stub, _):
        for request, kind, field in cases:
            error = await failure(stub.CreateBatch(request))
            assert (type(error), error.field) == (kind, field), request
        assert isinstance(await failure(stub.GetBatch(pb.GetBatchRequest(batch_id="b"))), NotFoundError)
        assert (await failure(stub.ListBatches(pb.ListBatchesRequest(page_size=101)))).field == "page_size"
        twice = pb.BatchLines(lines=[pb.BatchLine(custom_id="a", body=BODY)] * 2)
        made = (await stub.CreateBatch(create(endpoint=CHAT, lines=twice))).batch
        batch = await ended(stub, made.id)
        assert batch.status == pb.BATCH_STATUS_FAILED
        assert [(each.reason, each.line, each.field) for each in batch.problems] == [
            ("duplicate_custom_id", 2, "custom_id")
        ]
        assert not list((tmp_path / "batches" / "files").glob("*.part*"))


async def test_tenants_see_only_their_own_batches(model: ServedModel, tmp_path: Path) -> None:
    """A tenant cannot get, read or cancel another tenant's batch. A call without a key is refused."""
    keys = tmp_path / "keys.json"
    rows = [{"tenant": name, "key_sha256": hash_of(f"key-{name}")} for name in ("acme", "other")]
    keys.write_text(json.dumps({"keys": rows}))
    acme, other = ({"metadata": (("authorization", f"Bearer key-{name}"),)} for name in ("acme", "other"))
    async with served(model, tmp_path / "state", keys=keys) as (stub, _):
        create = pb.CreateBatchRequest(endpoint=CHAT, lines=lines(BODY))
        assert isinstance(await failure(stub.CreateBatch(create)), UnauthenticatedError)
        made = (await stub.CreateBatch(create, **acme)).batch
        assert (await ended(stub, made.id, **acme)).lines_completed == 1
        for method, request in (
            (stub.GetBatch, pb.GetBatchRequest(batch_id=made.id)),
            (stub.CancelBatch, pb.CancelBatchRequest(batch_id=made.id)),
            (stub.ListBatchResults, pb.ListBatchResultsRequest(batch_id=made.id)),
        ):
            assert isinstance(await failure(method(request, **other)), NotFoundError)
        assert not (await stub.ListBatches(pb.ListBatchesRequest(), **other)).batches
        assert len((await stub.ListBatches(pb.ListBatchesRequest(), **acme)).batches) == 1


async def test_a_frontend_without_a_store_has_no_batches(model: ServedModel) -> None:
    """Calls fail with the reason `batches_off`."""
    servicer = InferenceServicer(None)  # type: ignore[arg-type]  # no call gets as far as the pipeline
    with pytest.raises(NotFoundError) as caught:
        await servicer.GetBatch(pb.GetBatchRequest(batch_id="b"), None)  # type: ignore[arg-type]
    assert caught.value.reason == "batches_off"


REQUESTS = {"a": json.loads(BODY), "b": json.loads(BAD)}


def check_ended(batch: Batch, answers: list[BatchAnswer]) -> None:
    """Checks a batch with one successful request and one that was refused by its field."""
    assert (batch.status, batch.lines_total, batch.lines_completed, batch.lines_failed) == ("completed", 2, 1, 1)
    assert (batch.endpoint, dict(batch.metadata)) == ("/v1/chat/completions", {"job": "7"})
    assert batch.expires_s - batch.created_s == 3600 and batch.usage.output_tokens > 0
    by_id = {each.custom_id: each for each in answers}
    assert (by_id["a"].status_code, by_id["b"].status_code) == (200, 400)
    assert by_id["a"].body["choices"][0]["message"]["content"] == "Hello! one two"
    assert by_id["b"].body["error"]["param"] == "temperature"


async def test_the_asyncio_client(model: ServedModel, tmp_path: Path) -> None:
    """The client creates batches and reads their results. Errors have the same types whether the client or the server finds them."""
    async with listening(model, tmp_path) as (address, _), AsyncClient(address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.batches.create("/v1/moderations", REQUESTS)
        assert caught.value.field == "endpoint"
        with pytest.raises(InvalidRequestError):
            await client.batches.create("/v1/chat/completions")
        made = await client.batches.create("/v1/chat/completions", REQUESTS, window_s=3600, metadata={"job": "7"})
        batch = await client.batches.wait(made.id, poll_s=0.02, timeout_s=PATIENCE_S)
        check_ended(batch, [each async for each in client.batches.results(made.id)])
        assert [each.id for each in await client.batches.list()] == [made.id]
        again = await client.batches.create("/v1/chat/completions", input_file_id=made.input_file_id)
        assert (await client.batches.wait(again.id, poll_s=0.02, timeout_s=PATIENCE_S)).lines_total == 2
        assert [each.id for each in await client.batches.list(limit=1, after=again.id)] == [made.id]
        with pytest.raises(InvalidRequestError) as caught:
            await client.batches.cancel(made.id)
        assert caught.value.reason == "batch_ended"
        with pytest.raises(NotFoundError):
            await client.batches.get("batch_0")


async def test_the_blocking_client(model: ServedModel, tmp_path: Path) -> None:
    """The blocking client also times out while a batch runs, and cancels a batch."""

    def talk(address: str) -> None:
        with Client(address) as client:
            made = client.batches.create("/v1/chat/completions", REQUESTS, window_s=3600, metadata={"job": "7"})
            batch = client.batches.wait(made.id, poll_s=0.02, timeout_s=PATIENCE_S)
            with client.batches.results(made.id) as results:
                check_ended(batch, list(results))
            assert [each.id for each in client.batches.list()] == [made.id]
            hold_placements(apps.mesh)
            many = client.batches.create("/v1/chat/completions", {f"c{i}": REQUESTS["a"] for i in range(40)})
            with pytest.raises(DeadlineError):
                client.batches.wait(many.id, poll_s=0.01, timeout_s=0.05)
            assert client.batches.cancel(many.id).status in ("cancelling", "cancelled")
            assert client.batches.wait(many.id, poll_s=0.02, timeout_s=PATIENCE_S).status == "cancelled"
            assert sum(each.status_code == 0 for each in client.batches.results(many.id)) > 0

    async with listening(model, tmp_path) as (address, apps):
        await asyncio.to_thread(talk, address)


async def test_creating_a_batch_is_not_retried() -> None:
    """The client does not retry unless the server states that it rejected the call."""
    settings = ClientSettings(retry=RetryPolicy(attempts_max=5, pause_s=10.0))
    async with AsyncClient("127.0.0.1:1", settings) as client:
        with pytest.raises(LostError):
            await client.batches.create("/v1/chat/completions", REQUESTS, timeout_s=PATIENCE_S)
