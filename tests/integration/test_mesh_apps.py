"""Responses, messages, files, batches and embeddings over a whole mesh of processes with simulated engines."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.integration import apps_drive
from tests.integration.mesh import RunningMesh, argv_simulated, running_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    argv = argv_simulated("--prefill", "1", "--decode", "1")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv) as running:
        yield running


async def test_a_conversation_of_responses(mesh: RunningMesh) -> None:
    """Two turns, stored and continued."""
    await apps_drive.converse_in_responses(mesh)


async def test_responses_with_a_schema_and_a_forced_call(mesh: RunningMesh) -> None:
    """Valid for their schemas."""
    await apps_drive.force_in_responses(mesh)


async def test_messages(mesh: RunningMesh) -> None:
    """Whole, streamed and counted."""
    await apps_drive.converse_in_messages(mesh)


async def test_messages_with_a_forced_call(mesh: RunningMesh) -> None:
    """And its result."""
    await apps_drive.force_in_messages(mesh)


async def test_a_batch(mesh: RunningMesh) -> None:
    """A file goes up, a batch runs over the workers, every line comes down; the mesh is left clean."""
    bodies = [
        {"model": "demo", "messages": [{"role": "user", "content": f"say {i}"}], "max_tokens": 8} for i in range(30)
    ]
    output, errors = await apps_drive.run_batch(mesh, "/v1/chat/completions", bodies)
    assert [line["custom_id"] for line in output] == [f"c{i}" for i in range(30)] and not errors
    assert state_files(mesh.directory) == {"responses.sqlite", "batches"}


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/embeddings", {"input": "say it"}, "data"),
        ("/v1/completions", {"prompt": "say it", "max_tokens": 3}, "choices"),
        ("/v1/responses", {"input": "say it", "max_output_tokens": 3}, "output"),
    ],
)
async def test_a_batch_of_every_endpoint(mesh: RunningMesh, endpoint: str, body: dict[str, Any], field: str) -> None:
    """What can be asked can be asked in a batch."""
    await apps_drive.run_good_and_bad(mesh, endpoint, {"model": "demo", **body}, field)


def state_files(directory: Path) -> set[str]:
    """What the frontend keeps, in the mesh's own directory; SQLite's own files aside."""
    return {path.name for path in (directory / "state").iterdir() if not path.name.endswith(("-wal", "-shm"))}


async def test_the_page(mesh: RunningMesh) -> None:
    """Served by the real process."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{mesh.url}/openapi.json") as response:
            assert "/v1/batches" in (await response.json())["paths"]
        async with session.get(f"{mesh.url}/docs") as response:
            assert response.status == 200
