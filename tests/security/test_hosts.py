"""Protection from DNS rebinding: a page whose name resolves to 127.0.0.1 gets no answer."""

import asyncio
from dataclasses import replace

import pytest

from services.frontend.api.http.hosts import name_of
from services.frontend.models import ServedModel
from services.frontend.settings import FrontendSettings, HttpSettings
from tests.patience import PATIENCE_S
from tests.security.rig import CHAT, Connection, frontend, head_of

PATHS = ["/v1/models", "/metrics", "/health", "/live", CHAT, "/nothing"]


async def status_of(port: int, path: str, host: str) -> int:
    connection = await Connection.open(port)
    connection.writer.write(head_of(path, method="GET", Host=host))
    head = await asyncio.wait_for(connection.head(), PATIENCE_S)
    connection.writer.close()
    return int(head.split()[1])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil", "localhost.evil", "10.0.0.1"])
async def test_a_foreign_name_of_loopback_is_refused(model: ServedModel, host: str) -> None:
    """Every path refuses the name, including those that need no key."""
    async with frontend(model) as rig:
        assert [await status_of(rig.http_port, path, host) for path in PATHS] == [403] * len(PATHS)


async def test_names_of_loopback_and_listed_names_are_allowed(model: ServedModel) -> None:
    settings = FrontendSettings(http=HttpSettings(hosts=("api.example",)))
    async with frontend(model, settings=settings) as rig:
        for host in (
            "localhost",
            "localhost:8000",
            "127.0.0.1",
            "127.0.0.2:80",
            "[::1]:8000",
            "a.localhost",
            "API.example:1",
            "",
        ):
            assert await status_of(rig.http_port, "/live", host) == 200
        assert await status_of(rig.http_port, "/live", "example") == 403


async def test_beyond_loopback_every_name_is_allowed_unless_some_are_listed(model: ServedModel) -> None:
    """A server on a network address accepts all names by default, because it does not know its own names."""
    http = HttpSettings(host="0.0.0.0")
    async with frontend(model, settings=FrontendSettings(http=http)) as rig:
        assert await status_of(rig.http_port, "/live", "anything.example") == 200
    async with frontend(model, settings=FrontendSettings(http=replace(http, hosts=("api.example",)))) as rig:
        assert await status_of(rig.http_port, "/live", "anything.example") == 403
        assert await status_of(rig.http_port, "/live", "api.example") == 200


@pytest.mark.parametrize(
    ("host", "name"), [("a:80", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("A.b", "a.b"), ("", ""), ("a:b", "a:b")]
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert name_of(host) == name
