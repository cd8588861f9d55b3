"""A bounded run of `tests.integration.vllm_fuzz`: each value of each sampling parameter, and a pair of each two parameters."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.engines.vllm.registration import VLLM
from kvmesh.worker.fork_server import ForkServer
from tests.integration.vllm_fuzz import NAMES, SHAPES, VALUES, Found, Fuzz, prepare, start
from tests.parts import require_part

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.vllm, pytest.mark.timeout(600)]
SEED = 20
SINGLES = sum(map(len, VALUES.values())) + sum(map(len, SHAPES.values()))
PAIRS = len(NAMES) * (len(NAMES) - 1) // 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[ForkServer]:
    require_part("vllm")
    require_part("nixl")
    server = await ForkServer.start(VLLM.preload)
    yield server
    await server.aclose()


@pytest.mark.parametrize("roles", [("decode",), ("prefill", "decode")], ids=["single", "split"])
async def test_no_request_ends_an_engine(server: ForkServer, tmp_path: Path, roles: tuple[str, ...]) -> None:
    """Every request is answered or refused by name, none ends an engine, and a reference prompt has its tokens after each
    batch."""
    model = prepare(tmp_path)
    drives = await asyncio.gather(*(start(server, tmp_path, role, model) for role in roles))
    fuzz = Fuzz(drives[0] if len(drives) > 1 else None, drives[-1], SEED)
    found = Found()
    while found.requests < SINGLES + PAIRS and not found.broken:
        found = await fuzz.run(1)
    await asyncio.gather(*(drive.aclose() for drive in drives))
    assert not found.broken, f"after {found.requests} requests of seed {SEED}: {found.broken}"
    assert found.outcomes["length"] > found.requests / 3, "most requests are good ones"
