"""The streams between routers, without gRPC."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

from kvmesh.clock import SystemClock
from kvmesh.core import PeerUpdate
from services.router.core_settings import SyncSettings
from services.router.replicas.peer_streams import PeerStreams
from tests.unit.router_replicas import Routers


async def test_a_peer_is_lost_when_closing_its_stream_is_cancelled():
    """gRPC cancels the call of a lost peer even if the call is already closing. Its reservations must still be marked as orphaned."""
    routers = Routers("a", "b")
    routers.place("a")
    peer = routers.replicas["a"].open_session()
    reservations = routers.replicas["b"]
    unused: Any = None
    streams = PeerStreams(
        reservations,
        unused,
        unused,
        router_id="b",
        clock=SystemClock(),
        generator=Random(0),
        settings=SyncSettings(),
    )

    async def messages() -> AsyncIterator[PeerUpdate]:
        yield routers.replicas["a"].next_message(peer, now=routers.now)
        await asyncio.Event().wait()

    serving = streams.serve(messages())
    assert (await anext(serving)).is_snapshot
    while not reservations.counted:
        await asyncio.sleep(0)
    closing = asyncio.create_task(serving.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert reservations.counts.lost == 1
    assert not list(reservations)
    assert all(reservation.is_orphaned for reservation in routers.cores["b"].book)
