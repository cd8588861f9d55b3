"""Access to /ui, and limits on the number and slowness of its viewers."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import LoadRecord, Role, WorkerRef, WorkerView
from kvmesh.errors import UnavailableError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.mesh.view import MeshView
from kvmesh.rpc.settings import RpcSettings
from kvmesh.simulation.registry import MemoryAgent
from services.frontend.access import access as access_control
from services.frontend.access.access import Access
from services.frontend.access.keys import hash_of
from services.frontend.access.settings import AccessSettings
from services.frontend.settings import HttpSettings, UiSettings
from services.frontend.ui import encode, observer, routes
from services.frontend.ui.viewer import is_served
from tests.frontend_apps import running_part
from tests.patience import PATIENCE_S
from tests.ui.rig import running_page

OPERATOR, TENANT = "kvm-operator", "kvm-tenant"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the intervals."""
    monkeypatch.setattr(observer, "INTERVAL_S", 0.2)
    monkeypatch.setattr(access_control, "RELOAD_INTERVAL_S", 0.1)


@dataclass
class Reader:
    """Returns a mesh of `workers` workers, or raises `failure`."""

    workers: int = 1
    readings: int = 0
    failure: Exception | None = None
    read_one: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> MeshView:
        self.readings += 1
        self.read_one.set()
        if self.failure is not None:
            raise self.failure
        return MeshView(workers=[view(i) for i in range(self.workers)])


def view(number: int) -> WorkerView:
    worker = WorkerRef(worker_id=f"decode-{number}", address="x:1", epoch=1)
    return WorkerView(worker=worker, role=Role.DECODE, model="demo", trust="exact", load=LoadRecord())


@asynccontextmanager
async def page(
    directory: Path,
    reader: Reader,
    *,
    ui: UiSettings | None = None,
    http: HttpSettings | None = None,
    keys: Sequence[dict[str, object]] = (),
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Runs a frontend with /ui. Yields its address and a session."""
    clock, agent = SystemClock(), MemoryAgent()
    access = None
    if keys:
        write_keys(directory, keys)
        access = Access(AccessSettings(keys_file=str(directory / "keys.json")), clock)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_part(agent))
        channels = ChannelPool(settings=RpcSettings())
        stack.push_async_callback(channels.aclose)
        url = await stack.enter_async_context(
            running_page(
                directory, reader, registry=agent.registry(), channels=channels, access=access, ui=ui, http=http
            )
        )
        yield url, await stack.enter_async_context(aiohttp.ClientSession(read_bufsize=1 << 22))


def write_keys(directory: Path, keys: Sequence[dict[str, object]]) -> None:
    (directory / "keys.json").write_text(json.dumps({"keys": keys}))


def keys_of(*, operator: bool = True) -> list[dict[str, object]]:
    return [
        {"tenant": "ops", "key_sha256": hash_of(OPERATOR), "operator": operator},
        {"tenant": "acme", "key_sha256": hash_of(TENANT)},
    ]


async def status(session: aiohttp.ClientSession, url: str, **headers: str) -> int:
    """Returns the status of a request without reading its body."""
    async with session.get(url, headers=headers) as response:
        return response.status


async def first_event(response: aiohttp.ClientResponse) -> dict[str, object]:
    assert response.status == 200, await response.text()
    async with asyncio.timeout(PATIENCE_S):
        await response.content.readuntil(b"data: ")
        return dict(json.loads(await response.content.readuntil(b"\n\n")))


@pytest.mark.parametrize(
    ("ui", "host", "expected"),
    [
        (UiSettings(), "", True),
        (UiSettings(), "127.0.0.1", True),
        (UiSettings(), "0.0.0.0", False),
        (UiSettings(), "10.0.0.1", False),
        (UiSettings(allows_public=True), "10.0.0.1", True),
        (UiSettings(is_on=False, allows_public=True), "127.0.0.1", False),
    ],
)
def test_the_page_is_for_loopback_unless_allowed(ui: UiSettings, host: str, expected: bool) -> None:
    assert is_served(ui, HttpSettings(host=host)) is expected


async def test_the_page_does_not_exist_on_a_public_address(tmp_path: Path) -> None:
    """On a public address, the page's paths answer as if they did not exist."""
    async with page(tmp_path, Reader(), http=HttpSettings(host="0.0.0.0")) as (url, session):
        for path in ("/ui", "/ui/app.js", "/ui/events", "/ui/explain/x"):
            assert await status(session, url + path) == 404


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
async def test_forwarded_requests_count_as_public(tmp_path: Path, header: str) -> None:
    """A server on loopback behind a proxy counts as public."""
    async with page(tmp_path, Reader()) as (url, session):
        assert await status(session, f"{url}/ui", **{header: "203.0.113.7"}) == 404
        assert await status(session, f"{url}/ui/events", **{header: "203.0.113.7"}) == 404
    async with page(tmp_path, Reader(), ui=UiSettings(allows_public=True)) as (url, session):
        assert await status(session, f"{url}/ui", **{header: "203.0.113.7"}) == 200


async def test_a_public_name_is_refused_even_if_the_api_accepts_it(tmp_path: Path) -> None:
    async with page(tmp_path, Reader(), http=HttpSettings(hosts=("api.example",))) as (url, session):
        assert await status(session, f"{url}/ui", Host="api.example") == 404
        assert await status(session, f"{url}/ui", Host="evil.example") == 403
        assert await status(session, f"{url}/live", Host="api.example") == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
)
async def test_pages_of_other_origins_read_nothing(tmp_path: Path, headers: dict[str, str]) -> None:
    """Other origins cannot read the page's data even if CORS lets them use the API, and they do not count as viewers."""
    reader = Reader()
    async with page(tmp_path, reader, http=HttpSettings(cors_origins=("*",))) as (url, session):
        for path in ("/ui/events", "/ui/explain/x"):
            async with session.get(url + path, headers=headers) as response:
                assert response.status == 403
                assert "Access-Control-Allow-Origin" not in response.headers
        assert reader.readings == 0


async def test_data_needs_an_operator_key(tmp_path: Path) -> None:
    """The files are public because they contain no data. A key in the URL is ignored."""
    async with page(tmp_path, Reader(), keys=keys_of()) as (url, session):
        assert await status(session, f"{url}/ui") == await status(session, f"{url}/ui/app.js") == 200
        for path in ("/ui/events", "/ui/explain/x"):
            assert await status(session, url + path) == 401
            assert await status(session, f"{url}{path}?key={OPERATOR}&api_key={OPERATOR}") == 401
            assert await status(session, url + path, Authorization="Bearer wrong") == 401
            assert await status(session, url + path, Authorization=f"Bearer {TENANT}") == 403
        async with session.get(f"{url}/ui/events", headers={"Authorization": f"Bearer {OPERATOR}"}) as response:
            assert (await first_event(response))["workers"]
        # The router does not run: 503 shows that the key was accepted.
        assert await status(session, f"{url}/ui/explain/x", Authorization=f"Bearer {OPERATOR}") == 503


@pytest.mark.parametrize("keys", [[], keys_of(operator=False)], ids=["removed", "no operator any more"])
async def test_a_revoked_key_ends_the_stream(tmp_path: Path, keys: list[dict[str, object]]) -> None:
    async with page(tmp_path, Reader(), keys=keys_of()) as (url, session):
        async with session.get(f"{url}/ui/events", headers={"Authorization": f"Bearer {OPERATOR}"}) as response:
            await first_event(response)
            write_keys(tmp_path, keys)
            async with asyncio.timeout(PATIENCE_S):
                await response.content.read()


async def test_viewers_are_limited_and_share_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mesh is read once for all viewers, and not at all after the last one disconnects."""
    monkeypatch.setattr(observer, "VIEWERS_MAX", 2)
    reader = Reader()
    async with page(tmp_path, reader) as (url, session):
        assert reader.readings == 0
        async with session.get(f"{url}/ui/events") as first, session.get(f"{url}/ui/events") as second:
            await first_event(first)
            number = (await first_event(second))["number"]
            assert isinstance(number, int) and number <= reader.readings
            async with session.get(f"{url}/ui/events") as third:
                assert third.status == 503
                assert third.headers["Retry-After"] == "10"
                assert (await third.json())["error"]["code"] == "viewers_full"
        async with asyncio.timeout(PATIENCE_S):
            while True:
                seen = reader.readings
                await asyncio.sleep(0.5)
                if reader.readings == seen:
                    break
        async with session.get(f"{url}/ui/events") as again:
            await first_event(again)


async def test_a_viewer_that_does_not_read_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer that does not read does not buffer data, and other viewers continue."""
    monkeypatch.setattr(observer, "VIEWERS_MAX", 2)
    monkeypatch.setattr(encode, "WORKERS_MAX", 4000)
    monkeypatch.setattr(routes, "STALLED_VIEWER_TIMEOUT_S", 2.0)
    reader = Reader(workers=4000)
    async with page(tmp_path, reader) as (url, session):
        host, _, port = url.removeprefix("http://").partition(":")
        lazy, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            async with session.get(f"{url}/ui/events") as response:
                await first_event(response)
                async with asyncio.timeout(PATIENCE_S):
                    while await status(session, f"{url}/ui/events") == 503:
                        await asyncio.wait_for(response.content.readuntil(b"\n\n"), PATIENCE_S)
        finally:
            writer.transport.abort()
        assert lazy is not None


@pytest.mark.parametrize(
    "failure", [UnavailableError("the registry is away", reason="registry"), RuntimeError("a defect")]
)
async def test_a_failure_to_read_the_mesh_is_reported(tmp_path: Path, failure: Exception) -> None:
    """The frontend reports that it cannot read the mesh and continues. The text of a defect appears only in the log."""
    reader = Reader(failure=failure)
    async with page(tmp_path, reader) as (url, session):
        async with session.get(f"{url}/ui/events") as response:
            error = str((await first_event(response))["error"])
            assert error == ("the registry is away" if isinstance(failure, UnavailableError) else error)
            assert "a defect" not in error
            reader.failure = None
            async with asyncio.timeout(PATIENCE_S):
                while "workers" not in json.loads((await response.content.readuntil(b"\n\n")).partition(b"data: ")[2]):
                    pass
        assert await status(session, f"{url}/live") == 200


@pytest.mark.parametrize("name", ["x" * 200, "%0a", "a%00b"])
async def test_malformed_ids_are_refused(tmp_path: Path, name: str) -> None:
    async with page(tmp_path, Reader()) as (url, session):
        async with session.get(f"{url}/ui/explain/{name}") as response:
            assert response.status == 400
