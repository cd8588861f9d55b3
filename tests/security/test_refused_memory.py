"""A refused request leaves no garbage for the cyclic collector, which rarely collects older objects."""

import asyncio
import gc
import weakref

import aiohttp
import pytest

from kvmesh.errors import InvalidRequestError
from services.frontend.models import ServedModel
from tests.patience import PATIENCE_S
from tests.security.rig import CHAT, frontend


async def test_a_refused_request_is_freed_at_once(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of a refused request is freed without a collection. A reference cycle with its frame used to keep the bodies of refused
    requests."""
    made: list[weakref.ref[BaseException]] = []

    class Watched(InvalidRequestError):
        def __init__(self) -> None:
            super().__init__("refused", reason="invalid_json")
            made.append(weakref.ref(self))

    def refuse(body: bytes) -> None:
        raise Watched

    monkeypatch.setattr("services.frontend.api.http.exchange.parse_object", refuse)
    async with frontend(model) as rig, aiohttp.ClientSession() as session:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                async with session.post(rig.url + CHAT, json={}) as response:
                    assert response.status == 400
            assert len(made) == 3
            # The client may receive the last response a moment before the server's task ends.
            async with asyncio.timeout(PATIENCE_S):
                while any(each() for each in made):
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
