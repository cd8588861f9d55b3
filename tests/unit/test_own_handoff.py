"""The check of a prefill worker's own side channel before it registers."""

import asyncio

import pytest

from kvmesh.worker.own_handoff import side_channel_fault
from tests.servers import closed_port


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
async def test_a_side_channel_that_does_not_listen_is_reported(host: str, name: str) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
    source = f"{name}:{server.sockets[0].getsockname()[1]}"
    assert await side_channel_fault(source) is None
    server.close()
    await server.wait_closed()
    # A closed port that no other process can get, unlike that of the server.
    with closed_port(host) as port:
        source = f"{name}:{port}"
        fault = await side_channel_fault(source)
    assert fault is not None and fault.reason == "unreachable" and source in fault.detail


@pytest.mark.parametrize("source", ["", b"metadata"])
async def test_other_sources_have_no_side_channel(source: str | bytes) -> None:
    assert await side_channel_fault(source) is None
