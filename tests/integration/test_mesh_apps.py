"""Responses, messages, files, batches and embeddings over a whole mesh of processes with simulated engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from tests.integration.mesh import RunningMesh, argv_simulated, running_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS: Any = [{"role": "user", "content": "tell me something " * 20}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningMesh]:
    argv = argv_simulated("--prefill", "1", "--decode", "1")
    async with running_mesh(tmp_path_factory.mktemp("mesh"), *argv) as running:
        yield running


async def test_a_conversation_of_responses(mesh: RunningMesh) -> None:
    """Two turns, the second streamed; a later prompt's beginning is found in the cache."""
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        first = await client.responses.create(model="demo", input="tell me something " * 20, max_output_tokens=20)
        assert first.output_text and first.usage is not None
        stream = await client.responses.create(
            model="demo", input="and more", previous_response_id=first.id, max_output_tokens=20, stream=True
        )
        events = [event async for event in stream]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        second = last.response
        assert second.output_text == text
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + 10
        assert (await client.responses.retrieve(second.id)).output_text == text
        # On a busy machine another worker than the first turn's may be the sooner one, once or twice.
        cached, previous = second.usage.input_tokens_details.cached_tokens, second.id
        for _ in range(5):
            if cached:
                break
            turn = await client.responses.create(
                model="demo", input="more", previous_response_id=previous, max_output_tokens=5
            )
            assert turn.usage is not None
            cached, previous = turn.usage.input_tokens_details.cached_tokens, turn.id
        assert cached > 0
        await client.responses.delete(first.id)


async def test_messages(mesh: RunningMesh) -> None:
    """Whole and streamed say the same; the count is the prompt's."""
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(model="demo", max_tokens=20, messages=WORDS, extra_body={"temperature": 0})
        async with client.messages.stream(
            model="demo", max_tokens=20, messages=WORDS, extra_body={"temperature": 0}
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert whole.content[0].type == "text" and whole.content[0].text == text
        counted = await client.messages.count_tokens(model="demo", messages=WORDS)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


async def test_a_batch(mesh: RunningMesh) -> None:
    """A file goes up, a batch runs over the workers, every line comes down; the mesh is left clean."""
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "demo", "messages": [{"role": "user", "content": f"say {i}"}], "max_tokens": 8}}
        for i in range(30)
    ]  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        data = "\n".join(json.dumps(line) for line in lines).encode()
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        async with asyncio.timeout(60):
            while (batch := await client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
                await asyncio.sleep(0.1)
        assert batch.status == "completed" and batch.request_counts is not None and batch.output_file_id is not None
        assert batch.request_counts.completed == 30
        output = (await client.files.content(batch.output_file_id)).text.splitlines()
        assert [json.loads(line)["custom_id"] for line in output] == [f"c{i}" for i in range(30)]
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
    """What can be asked can be asked in a batch; a line that is wrong is told by its field and spoils no other."""
    bodies = [{"model": "demo", **body}, {"model": "demo", **body, "no_such_field": 1}]
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": each} for i, each in enumerate(bodies)]
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        data = "\n".join(json.dumps(line) for line in lines).encode()
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,
            completion_window="24h",  # type: ignore[arg-type]
        )
        async with asyncio.timeout(60):
            while (batch := await client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
                await asyncio.sleep(0.1)
        assert batch.output_file_id is not None and batch.error_file_id is not None
        (good,) = map(json.loads, (await client.files.content(batch.output_file_id)).text.splitlines())
        (bad,) = map(json.loads, (await client.files.content(batch.error_file_id)).text.splitlines())
    assert (good["custom_id"], good["response"]["status_code"]) == ("c0", 200)
    assert good["response"]["body"][field]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("c1", 400)
    assert "no_such_field" in bad["response"]["body"]["error"]["message"]


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
