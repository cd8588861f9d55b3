"""Refused requests and auxiliary endpoints also count against the quotas of a key."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1.inference_pb2_grpc import InferenceServiceStub
from services.frontend.access.access import Access
from services.frontend.access.settings import AccessSettings
from services.frontend.models import ServedModel
from tests.conformance.manual_clock import ManualClock
from tests.frontend_apps import running_apps
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import BODY, CHAT, Connection, Rig, frontend, head_of, write_keys

TEXT = "one two three four five six " * 20


def key_document(tmp_path: Path, **limits: Any) -> Path:
    return write_keys(tmp_path / "keys.json", [{"tenant": "acme", "key": "good", **limits}])


async def status_of(rig: Rig, body: Any, path: str = CHAT) -> int:
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer good"}) as session,
        session.post(rig.url + path, json=body) as response,
    ):
        await response.read()
        return response.status


async def test_refused_requests_are_charged_and_further_ones_are_not_read(model: ServedModel, tmp_path: Path) -> None:
    """Invalid requests count against the limit of three per minute. The server refuses further requests by their head."""
    async with frontend(model, keys=key_document(tmp_path, requests_per_minute=3)) as rig:
        assert [await status_of(rig, {"model": "tiny"}) for _ in range(4)] == [400] * 4
        connection = await Connection.open(rig.http_port)
        values = {"Content_Type": "application/json", "Content_Length": "5000000", "Authorization": "Bearer good"}
        connection.writer.write(head_of(**values))
        head = await asyncio.wait_for(connection.head(), PATIENCE_S)
        assert b" 429 " in head and b"Retry-After" in head
        assert await status_of(rig, BODY) == 429


async def test_a_large_refused_body_is_charged_in_tokens(model: ServedModel, tmp_path: Path) -> None:
    async with frontend(model, keys=key_document(tmp_path, tokens_per_minute=1000)) as rig:
        assert await status_of(rig, {"model": "tiny", "messages": "x" * 20_000}) == 400
        assert await status_of(rig, {"model": "tiny", "messages": "x" * 40_000}) == 400
        assert await status_of(rig, {"model": "tiny"}) == 429


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_tokenising_is_charged(model: ServedModel, tmp_path: Path, path: str) -> None:
    """Tokenising counts as a fraction of the tokens of its text."""
    async with frontend(model, keys=key_document(tmp_path, tokens_per_minute=50)) as rig:
        statuses = [await status_of(rig, {"model": "tiny", "prompt": TEXT}, path) for _ in range(10)]
        assert statuses[0] == 200 and statuses[-1] == 429


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_detokenising_is_charged(model: ServedModel, tmp_path: Path, path: str) -> None:
    """Detokenising counts against the tokens per minute."""
    async with frontend(model, keys=key_document(tmp_path, tokens_per_minute=50)) as rig:
        statuses = [await status_of(rig, {"model": "tiny", "tokens": [5] * 400}, path) for _ in range(5)]
        assert statuses[0] == 200 and statuses[-1] == 429


async def test_grpc_calls_are_charged_too(model: ServedModel, tmp_path: Path) -> None:
    metadata = (("authorization", "Bearer good"),)
    async with (
        frontend(model, keys=key_document(tmp_path, tokens_per_minute=50)) as rig,
        grpc.aio.insecure_channel(rig.rpc_address) as channel,
    ):
        stub, codes = InferenceServiceStub(channel), []
        for _ in range(10):
            try:
                await stub.Tokenize(pb.TokenizeRequest(model="tiny", text=TEXT), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
        assert codes and set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_schemas_are_charged(model: ServedModel, tmp_path: Path) -> None:
    """A request with a long schema costs more than the same request without one."""
    fields = {f"p{number}": {"type": "string"} for number in range(200)}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": fields}}}
    model = replace(model, features=model.features | {"structured_output"})
    for more, wanted in (({}, 200), ({"response_format": schema}, 429)):
        async with frontend(model, keys=key_document(tmp_path, tokens_per_minute=1000)) as rig:
            assert await status_of(rig, BODY | more) == 200
            assert await status_of(rig, BODY) == wanted


@pytest.mark.parametrize(
    ("limits", "size_bytes", "wanted"),
    [
        ({"requests_per_minute": 2}, 10, [200, 200, 200, 429]),
        ({"tokens_per_minute": 1000}, 600 << 10, [200, 200, 429, 429]),
    ],
)
async def test_uploads_are_charged(
    model: ServedModel, tmp_path: Path, limits: dict[str, int], size_bytes: int, wanted: list[int]
) -> None:
    """An upload counts as one request and one token per KiB. The server refuses the next upload of a key over its quota by its head."""
    access = Access(AccessSettings(keys_file=str(key_document(tmp_path, **limits))), ManualClock())
    async with running_apps([model], FakeMesh(answer=lambda _: [3, 2]), tmp_path, access=access) as running:
        statuses = []
        for _ in wanted:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", b"x" * size_bytes, filename="x.jsonl")
            headers = {"Authorization": "Bearer good"}
            async with running.session.post(f"{running.url}/v1/files", data=form, headers=headers) as response:
                statuses.append(response.status)
    assert statuses == wanted


async def test_priority_above_zero_needs_the_keys_permission(model: ServedModel, tmp_path: Path) -> None:
    """`priority_max` is 0 unless the key sets it. Without keys, every priority is allowed."""
    for limits, wanted in (({}, 400), ({"priority_max": 5}, 200)):
        async with frontend(model, keys=key_document(tmp_path, **limits)) as rig:
            assert await status_of(rig, {**BODY, "priority": 5}) == wanted
            assert await status_of(rig, {**BODY, "priority": 0}) == 200
            assert await status_of(rig, {**BODY, "priority": -5}) == 200
            assert await status_of(rig, {**BODY, "priority": 6}) == 400
    async with frontend(model) as rig:
        assert await status_of(rig, {**BODY, "priority": 6}) == 200
    assert json.loads((tmp_path / "keys.json").read_text())["keys"][0]["priority_max"] == 5
