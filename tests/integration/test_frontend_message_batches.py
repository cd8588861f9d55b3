"""Message batches on loopback, called by Anthropic's client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from services.frontend.models import ServedModel
from tests.batch_process import QUICK, answering
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import served_model, write_model
from tests.patience import PATIENCE_S

PATH = "/v1/messages/batches"
SETTINGS = AppSettings(batches=QUICK)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def running(model: ServedModel, tmp_path: Path) -> AsyncIterator[RunningApps]:
    async with running_apps([model], answering(model), tmp_path, apps=SETTINGS) as running:
        yield running


@pytest.fixture
async def client(running: RunningApps) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(running.url) as client:
        yield client


def anthropic_client(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


def request(i: int, **params: Any) -> Any:
    messages = [{"role": "user", "content": f"number {i}"}]
    return {"custom_id": f"c{i}", "params": {"model": "tiny", "max_tokens": 20, "messages": messages, **params}}


async def ended(client: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while (batch := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
            await asyncio.sleep(0.02)
    return batch


async def results_of(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    return {each.custom_id: each.result async for each in await client.messages.batches.results(batch_id)}


async def test_results_are_those_of_their_requests(client: anthropic.AsyncAnthropic) -> None:
    """Each request has its own result. An invalid request fails alone, with Anthropic's error object, and the counts add up."""
    requests = [*(request(i) for i in range(8)), request(8, temperature=3), request(9, model="absent")]
    made = await client.messages.batches.create(requests=requests)
    assert made.type == "message_batch" and made.id.startswith("msgbatch_") and made.request_counts.processing == 10
    batch = await ended(client, made.id)
    assert batch.ended_at >= batch.created_at and batch.expires_at > batch.ended_at
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (8, 2, 0)
    results = await results_of(client, made.id)
    assert sorted(results) == [f"c{i}" for i in range(10)]
    for i in range(8):
        assert results[f"c{i}"].type == "succeeded"
        assert results[f"c{i}"].message.content[0].text == f"answer {i}"
        assert results[f"c{i}"].message.usage.output_tokens > 0
    assert [results[name].type for name in ("c8", "c9")] == ["errored", "errored"]
    assert results["c8"].error.error.type == "invalid_request_error"
    assert results["c9"].error.error.type == "not_found_error"


async def test_a_cancelled_batch_reports_requests_that_did_not_run(model: ServedModel, tmp_path: Path) -> None:
    """Their results are `canceled`. The batch can be deleted only after it has ended."""
    mesh = answering(model, hangs_from=4)
    async with running_apps([model], mesh, tmp_path, apps=SETTINGS) as running, anthropic_client(running.url) as client:
        made = await client.messages.batches.create(requests=[request(i) for i in range(40)])
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.batches.delete(made.id)
        with pytest.raises(anthropic.AnthropicError):
            await client.messages.batches.results(made.id)
        cancelled = await client.messages.batches.cancel(made.id)
        assert cancelled.processing_status in ("canceling", "ended") and cancelled.cancel_initiated_at is not None
        batch = await ended(client, made.id)
        results = await results_of(client, made.id)
        kinds = [each.type for each in results.values()]
        assert len(kinds) == 40 and set(kinds) <= {"succeeded", "canceled"} and "canceled" in kinds
        assert batch.request_counts.canceled == kinds.count("canceled")
        assert batch.request_counts.succeeded == kinds.count("succeeded")
        assert (await client.messages.batches.delete(made.id)).id == made.id
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.retrieve(made.id)


async def test_lists_page_in_both_directions(running: RunningApps, client: anthropic.AsyncAnthropic) -> None:
    """Lists have the newest batch first. OpenAI's API does not show message batches."""
    made = [(await client.messages.batches.create(requests=[request(i)])).id for i in range(5)]
    listed = [each.id async for each in client.messages.batches.list(limit=2)]
    assert listed == made[::-1]
    page = await client.messages.batches.list(before_id=made[1], limit=2)
    assert [each.id for each in page.data] == [made[3], made[2]] and page.has_more
    _, others, _ = await running.call("GET", "/v1/batches")
    assert others["data"] == []
    for method, path in (("GET", ""), ("POST", "/cancel")):
        status, _, _ = await running.call(method, f"/v1/batches/{made[0]}{path}")
        assert status == 404, path


BAD: list[Any] = [
    ({}, "requests"), ({"requests": []}, "requests"), ({"requests": [{"custom_id": "a"}]}, "params"),
    ({"requests": [{"custom_id": "a b", "params": {}}]}, "custom_id"),
    ({"requests": [{"custom_id": "a", "params": []}]}, "params"),
    ({"requests": [request(1), request(1)]}, "custom_id"),
]  # fmt: skip


async def test_bad_input_gives_an_error_with_the_field(running: RunningApps) -> None:
    """Errors have Anthropic's form and name the field. Unknown ids give a 404."""
    for body, field in BAD:
        status, answer, _ = await running.call("POST", PATH, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (body, answer)
        assert field in answer["error"]["message"], (body, answer)
    for path in ("absent", "absent/results", "absent/cancel"):
        method = "POST" if path.endswith("cancel") else "GET"
        status, answer, _ = await running.call(method, f"{PATH}/{path}")
        assert (status, answer["error"]["type"]) == (404, "not_found_error"), path
    status, answer, _ = await running.call("GET", f"{PATH}?limit=0")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
