"""No tenant can use up shared resources: stores, uploads, running batches, requests in flight."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import NotFoundError, OverloadedError
from services.frontend.access.access import Access
from services.frontend.access.settings import AccessSettings
from services.frontend.api.batches import runner
from services.frontend.models import ServedModel
from services.frontend.settings import BatchSettings, FrontendSettings, PipelineSettings, ResponsesSettings
from services.frontend.stores.batch_rows import MIGRATIONS
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.contents import DirectoryContents
from services.frontend.stores.files import FileStore
from services.frontend.stores.responses import MIGRATIONS as RESPONSES
from services.frontend.stores.responses import ResponseStore
from services.frontend.stores.sqlite import SqliteDatabase
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import BODY, CHAT, frontend, write_keys

TENANTS = [{"tenant": each, "key": each} for each in ("flood", "lone")]
BATCHES = "/v1/messages/batches"


async def test_stored_responses_of_one_tenant_displace_only_its_own(tmp_path: Path) -> None:
    """When the store is full of one tenant's responses, an older response of another tenant stays."""
    database = SqliteDatabase(tmp_path / "r.sqlite", RESPONSES, busy_timeout_s=60.0)
    store = ResponseStore(database, ResponsesSettings(stored_bytes_max=20_000), SystemClock())
    await database.open()
    try:
        for number in range(60):
            body = {"id": f"r{number}", "previous_response_id": None, "output": ["x" * 1000]}
            await store.put("lone" if number == 0 else "flood", body, items=[])
        assert (await store.get(owner="lone", response_id="r0")).body["id"] == "r0"
        assert (await store.get(owner="flood", response_id="r59")).body["id"] == "r59"
        with pytest.raises(NotFoundError):
            await store.get(owner="flood", response_id="r1")
    finally:
        await database.aclose()


async def test_files_and_batches_of_one_tenant_leave_room_for_others(tmp_path: Path) -> None:
    """One tenant may use half of the limits. Without keys there is one owner, which may use all."""
    settings = BatchSettings(files_max=8, files_bytes_max=1000, batches_max=4)
    database = SqliteDatabase(tmp_path / "b.sqlite", MIGRATIONS, busy_timeout_s=60.0)
    await database.open()
    files = FileStore(contents=DirectoryContents(tmp_path), database=database, settings=settings, clock=SystemClock())
    batches = BatchStore(database, settings, SystemClock(), instance_id="one")

    async def add(owner: str, number: int, size_bytes: int = 1) -> None:
        file_id = f"file-{owner}-{number}"
        await files.add(owner=owner, file_id=file_id, name="x", purpose="batch", size_bytes=size_bytes, ttl_s=None)

    async def create(owner: str, number: int) -> None:
        await batches.create(
            owner=owner,
            batch_id=f"{owner}{number}",
            endpoint=CHAT,
            input_file_id="f",
            completion_window="24h",
            window_s=1000.0,
            metadata=None,
            output_ttl_s=None,
        )

    try:
        for make, most in ((add, 4), (create, 2)):
            for number in range(most):
                await make("flood", number)
            with pytest.raises(OverloadedError):
                await make("flood", most)
            await make("lone", 0)
        with pytest.raises(OverloadedError):
            await add("lone", 1, 501)
        await add("lone", 1, 400)
        await create("", 0)
    finally:
        await database.aclose()


async def test_requests_in_flight_of_one_tenant_leave_room_for_others(model: ServedModel, tmp_path: Path) -> None:
    """A tenant with half of the requests in flight gets 503. Others are served."""
    mesh = FakeMesh(answer=lambda _: [3, 4, 2])
    mesh.faults.stalls_after = 0
    settings = FrontendSettings(pipeline=PipelineSettings(requests_max=4))
    async with (
        frontend(model, mesh=mesh, settings=settings, keys=write_keys(tmp_path / "k.json", TENANTS)) as rig,
        aiohttp.ClientSession() as session,
    ):

        async def ask(key: str) -> tuple[int, Any]:
            async with session.post(rig.url + CHAT, json=BODY, headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status, (await response.json()).get("error", {}).get("code")

        stalled = [asyncio.create_task(ask("flood")) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while mesh.stalled < 2:
                await asyncio.sleep(0.01)
        assert await ask("flood") == (503, "tenant_full")
        mesh.faults.stalls_after = None
        assert await ask("lone") == (200, None)
        for task in stalled:
            task.cancel()
        await asyncio.wait(stalled)


@pytest.mark.parametrize(("running_max", "turn_s"), [(2, 60.0), (1, 0.1)])
async def test_long_batches_do_not_block_short_ones(
    model: ServedModel, tmp_path: Path, running_max: int, turn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short batch of another tenant runs although one tenant's long batches hold every slot. The long batches then finish with all results."""
    keys = write_keys(tmp_path / "k.json", TENANTS)
    monkeypatch.setattr(runner, "TURN_S", turn_s)
    apps = AppSettings(batches=BatchSettings(running_max=running_max, lines_in_flight_max=2, poll_s=0.05))
    access = Access(AccessSettings(keys_file=str(keys)), SystemClock())
    mesh = FakeMesh(answer=lambda _: [3, 4, 2], step_s=0.02)
    async with running_apps([model], mesh, tmp_path, apps=apps, access=access) as running:
        long = [await create(running, "flood", 60) for _ in range(running_max + 1)]
        async with asyncio.timeout(PATIENCE_S):
            while running.batches.running < running_max:
                await asyncio.sleep(0.01)
        short = await create(running, "lone", 2)
        assert (await ended(running, "lone", short))["request_counts"]["succeeded"] == 2
        for each in long:
            assert (await ended(running, "flood", each))["request_counts"]["succeeded"] == 60
    # The order of the requests does not depend on when this test sees the end of a batch.
    tenants = [each.tenant for each in mesh.asks]
    assert len(tenants) == 60 * len(long) + 2
    assert "flood" in tenants[len(tenants) - tenants[::-1].index("lone") :]


async def create(running: RunningApps, key: str, lines: int) -> str:
    params = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    requests = [{"custom_id": f"r{number}", "params": params} for number in range(lines)]
    status, body, _ = await running.call("POST", BATCHES, {"requests": requests}, headers={"x-api-key": key})
    assert status == 200, body
    return str(body["id"])


async def ended(running: RunningApps, key: str, batch_id: str) -> Any:
    """Waits for the end of a batch."""
    async with asyncio.timeout(PATIENCE_S):
        while (body := await batch(running, key, batch_id))["processing_status"] != "ended":
            await asyncio.sleep(0.05)
    return body


async def batch(running: RunningApps, key: str, batch_id: str) -> Any:
    status, body, _ = await running.call("GET", f"{BATCHES}/{batch_id}", headers={"x-api-key": key})
    assert status == 200, body
    return body
