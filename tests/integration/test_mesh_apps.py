"""Responses, messages, files, batches and embeddings on a whole mesh of processes with simulated engines."""

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
    """A conversation of two turns is stored and continued."""
    await apps_drive.converse_in_responses(mesh)


async def test_responses_with_a_schema_and_a_forced_call(mesh: RunningMesh) -> None:
    """The answer and the call's arguments match their schemas."""
    await apps_drive.force_in_responses(mesh)


async def test_messages(mesh: RunningMesh) -> None:
    """A message is the same whole and streamed, and its tokens are counted."""
    await apps_drive.converse_in_messages(mesh)


async def test_messages_with_a_forced_call(mesh: RunningMesh) -> None:
    """A call is forced, and its result is sent."""
    await apps_drive.force_in_messages(mesh)


async def test_a_batch(mesh: RunningMesh) -> None:
    """A file is uploaded, and a batch runs on the workers and answers every line. The frontend leaves no other files."""
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
    """A batch can use every endpoint."""
    await apps_drive.run_good_and_bad(mesh, endpoint, {"model": "demo", **body}, field)


def state_files(directory: Path) -> set[str]:
    """Returns the files that the frontend keeps in its state directory, without SQLite's temporary ones."""
    return {path.name for path in (directory / "state").iterdir() if not path.name.endswith(("-wal", "-shm"))}


async def test_the_page(mesh: RunningMesh) -> None:
    """The real process serves the API document and its page."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{mesh.url}/openapi.json") as response:
            assert "/v1/batches" in (await response.json())["paths"]
        async with session.get(f"{mesh.url}/docs") as response:
            assert response.status == 200
