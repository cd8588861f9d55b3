"""Files and batches on loopback, called by the official client. Crashes kill real processes."""

import asyncio
import io
import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.core import Generation
from kvmesh.errors import LostError, OverloadedError, UnavailableError
from services.frontend.models import ServedModel
from tests.batch_process import QUICK, answering
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import Faults, served_model, write_model
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
# A frontend that stands still for longer than its lease loses the batch, and its lines run again.
STEADY = replace(QUICK, lease_s=600.0)
SETTINGS = AppSettings(batches=STEADY)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_directory: Path) -> ServedModel:
    return served_model(model_directory)


@pytest.fixture
async def running(model: ServedModel, tmp_path: Path) -> AsyncIterator[RunningApps]:
    async with running_apps([model], answering(model), tmp_path, apps=SETTINGS) as running:
        yield running


@pytest.fixture
async def client(running: RunningApps) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(running.url) as client:
        yield client


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat_line(i: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"number {i}"}], **more}
    return {"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


async def start_batch(client: openai.AsyncOpenAI, data: bytes, *, endpoint: Any = CHAT, window: Any = "24h") -> Any:
    """Uploads a file and creates a batch of it."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)


async def completed(client: openai.AsyncOpenAI, batch_id: str) -> int:
    """Returns the number of lines that have succeeded so far."""
    counts = (await client.batches.retrieve(batch_id)).request_counts
    assert counts is not None
    return counts.completed


async def wait_ended(client: openai.AsyncOpenAI, batch_id: str, timeout_s: float = PATIENCE_S) -> Any:
    """Polls until the batch has ended."""
    async with asyncio.timeout(timeout_s):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def read_lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    """Returns the records of an output or error file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_runs_through_the_client(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """Every line is answered once, in order, under its id. Errors of single lines are in the error file."""
    lines: list[Any] = [chat_line(i) for i in range(20)]
    lines[3]["body"]["temperature"] = 9
    lines[7]["body"]["model"] = "other"
    lines[9]["body"]["stream"] = True
    made = await start_batch(client, jsonl(lines))
    assert (made.status, made.object, made.endpoint) == ("validating", "batch", CHAT)
    batch = await wait_ended(client, made.id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"completed": 17, "failed": 3, "total": 20}
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.expires_at
    output = await read_lines(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(20) if i not in (3, 7, 9)]
    for each in output:
        body = each["response"]["body"]
        assert each["error"] is None and each["response"]["status_code"] == 200
        assert body["choices"][0]["message"]["content"] == f"answer {each['custom_id'][1:]}"
    errors = await read_lines(client, batch.error_file_id)
    found = [
        (each["custom_id"], each["response"]["status_code"], each["response"]["body"]["error"]["param"])
        for each in errors
    ]
    assert found == [("c3", 400, "temperature"), ("c7", 404, "model"), ("c9", 400, "stream")]
    usage = [each["response"]["body"]["usage"] for each in output]
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in usage)
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in usage)
    assert {generation.priority for generation in running.mesh.generations} == {-100}
    assert 'code="500"' not in running.metrics()


async def test_endpoints_of_batches(client: openai.AsyncOpenAI) -> None:
    """Completions and responses work as over HTTP. Other endpoints are refused, and the error names the field."""
    bodies: list[tuple[Any, dict[str, Any]]] = [
        ("/v1/completions", {"model": "tiny", "prompt": "number 5", "max_tokens": 50}),
        ("/v1/responses", {"model": "tiny", "input": "number 5"}),
    ]
    for endpoint, body in bodies:
        line = {"custom_id": "x", "method": "POST", "url": endpoint, "body": body}
        batch = await wait_ended(client, (await start_batch(client, jsonl([line]), endpoint=endpoint)).id)
        (record,) = await read_lines(client, batch.output_file_id)
        assert "answer 5" in json.dumps(record["response"]["body"])
        if endpoint == "/v1/responses":
            stored = await client.responses.retrieve(record["response"]["body"]["id"])
            assert stored.output_text == "answer 5"
    with pytest.raises(openai.BadRequestError) as caught:
        await start_batch(client, jsonl([chat_line(1)]), endpoint="/v1/moderations")
    assert caught.value.param == "endpoint"


async def test_a_malformed_file_fails_the_batch(client: openai.AsyncOpenAI) -> None:
    """The batch's errors name the line and what is wrong with it, and no line runs."""
    wrong: list[tuple[Any, str, int | None]] = [
        (b"{", "invalid_json_line", 2), (b"[]", "invalid_json_line", 2), ({}, "invalid_custom_id", 2),
        ({**chat_line(1), "method": "GET"}, "invalid_method", 2), (chat_line(0), "duplicate_custom_id", 2),
        ({**chat_line(1), "url": "/v1/completions"}, "mismatched_endpoint", 2),
        ({**chat_line(1), "body": []}, "invalid_body", 2), ({**chat_line(1), "x": 1}, "unknown_field", 2),
    ]  # fmt: skip
    for line, code, number in wrong:
        batch = await wait_ended(client, (await start_batch(client, jsonl([chat_line(0), line]))).id)
        assert batch.status == "failed"
        assert [(each.code, each.line) for each in batch.errors.data] == [(code, number)]
    batch = await wait_ended(client, (await start_batch(client, b"\n\n")).id)
    assert [each.code for each in batch.errors.data] == ["empty_file"]


async def test_batches_are_bounded(model: ServedModel, tmp_path: Path) -> None:
    """Limits apply to the lines, the bytes of a line, the bytes of a file, and the concurrent requests."""
    limits = replace(STEADY, lines_max=3, line_bytes_max=400, file_bytes_max=4096, lines_in_flight_max=2)
    settings = AppSettings(batches=limits)
    mesh = answering(model)
    async with (
        running_apps([model], mesh, tmp_path, apps=settings) as running,
        openai_client(running.url) as client,
    ):
        batch = await wait_ended(client, (await start_batch(client, jsonl(chat_line(i) for i in range(4)))).id)
        assert [each.code for each in batch.errors.data] == ["too_many_lines"]
        batch = await wait_ended(client, (await start_batch(client, jsonl([chat_line(1, user="x" * 400)]))).id)
        assert [(each.code, each.line) for each in batch.errors.data] == [("line_too_long", 1)]
        with pytest.raises(openai.APIStatusError) as caught:
            await start_batch(client, b" " * 5000)
        assert caught.value.status_code == 413
        in_flight: list[int] = []

        async def count(_: Generation, sent: int) -> None:
            in_flight.append(running.pipeline.in_flight)

        mesh.before_step = count
        batches = [await start_batch(client, jsonl(chat_line(i) for i in range(3))) for _ in range(2)]
        assert [(await wait_ended(client, each.id)).status for each in batches] == ["completed"] * 2
        assert set(in_flight) <= {1, 2}
        left = [path.name for path in list_files(tmp_path / "batches" / "files") if ".part" in path.name]
        assert not left


def list_files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


async def test_a_busy_mesh_delays_lines_and_fails_none(model: ServedModel, tmp_path: Path) -> None:
    """Refused lines are retried, and lost ones a few times."""
    mesh = answering(model)
    mesh.faults = Faults(
        place=[OverloadedError("full"), UnavailableError("none", reason="no_worker")] * 3, leg_after=1,
        leg_error=LostError("gone"),
    )  # fmt: skip
    async with running_apps([model], mesh, tmp_path, apps=SETTINGS) as running, openai_client(running.url) as client:
        batch = await wait_ended(client, (await start_batch(client, jsonl(chat_line(i) for i in range(8)))).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 8)


async def test_cancelling_keeps_completed_lines(model: ServedModel, tmp_path: Path) -> None:
    """Lines in flight are cancelled on their workers, and every line has one record. A batch cannot be cancelled twice."""
    mesh = answering(model, hangs_from=8)
    async with running_apps([model], mesh, tmp_path, apps=SETTINGS) as running, openai_client(running.url) as client:
        made = await start_batch(client, jsonl(chat_line(i) for i in range(40)))
        async with asyncio.timeout(PATIENCE_S):
            while await completed(client, made.id) < 4:
                await asyncio.sleep(0.02)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        batch = await wait_ended(client, made.id)
        assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
        done, rest = [await read_lines(client, each) for each in (batch.output_file_id, batch.error_file_id)]
        assert 4 <= len(done) <= 8
        assert Counter(each["custom_id"] for each in (*done, *rest)) == Counter(f"c{i}" for i in range(40))
        assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
        assert not mesh.running and not running.pipeline.in_flight
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(made.id)


async def test_the_end_of_the_window_expires_remaining_lines(model: ServedModel, tmp_path: Path) -> None:
    """Completed lines are in the output file, and the others in the error file."""
    mesh = answering(model, step_s=0.05)
    async with running_apps([model], mesh, tmp_path, apps=SETTINGS) as running, openai_client(running.url) as client:
        made = await start_batch(client, jsonl(chat_line(i) for i in range(40)), window="1s")
        batch = await wait_ended(client, made.id)
        assert batch.status == "expired" and batch.expired_at
        done, rest = [await read_lines(client, each) for each in (batch.output_file_id, batch.error_file_id)]
        assert Counter(each["custom_id"] for each in (*done, *rest)) == Counter(f"c{i}" for i in range(40))
        assert rest and {each["error"]["code"] for each in rest} == {"batch_expired"}
        assert batch.request_counts.total == 40 == batch.request_counts.completed + batch.request_counts.failed


async def test_a_batch_resumes_after_its_frontend_is_killed(
    model_directory: Path, model: ServedModel, tmp_path: Path
) -> None:
    """After kill -9, another frontend continues the batch, and no line is lost or answered twice."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.batch_process", str(model_directory), str(tmp_path), "0.02", "--hangs-from", "30",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode().strip()
        async with openai_client(url) as client:
            made = await start_batch(client, jsonl(chat_line(i) for i in range(60)))
            async with asyncio.timeout(PATIENCE_S):
                while (done := await completed(client, made.id)) < 8:
                    await asyncio.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    assert 8 <= done < 60
    async with (
        running_apps([model], answering(model), tmp_path, apps=SETTINGS, instance_id="heir") as running,
        openai_client(running.url) as client,
    ):
        batch = await wait_ended(client, made.id)
        assert batch.request_counts.model_dump() == {"completed": 60, "failed": 0, "total": 60}
        output = await read_lines(client, batch.output_file_id)
        assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(60)]
        texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in output]
        assert texts == [f"answer {i}" for i in range(60)]
        assert len(running.mesh.asks) <= 60 - done
        assert batch.error_file_id is None


async def test_several_frontends_share_batches_and_run_none_twice(model: ServedModel, tmp_path: Path) -> None:
    """Each line runs once, in the frontend that holds the batch's lease."""
    meshes = [answering(model) for _ in range(2)]

    async def wait_for_both(_: Generation, sent: int) -> None:
        while not all(mesh.asks for mesh in meshes):
            await asyncio.sleep(0.01)

    for mesh in meshes:
        mesh.before_step = wait_for_both
    one = AppSettings(batches=replace(STEADY, running_max=1))
    async with (
        running_apps([model], meshes[0], tmp_path, apps=one, instance_id="a") as first,
        running_apps([model], meshes[1], tmp_path, apps=one, instance_id="b") as second,
        openai_client(first.url) as client,
        openai_client(second.url) as other,
    ):
        made = [await start_batch(client, jsonl(chat_line(i) for i in range(15))) for _ in range(4)]
        batches = [await wait_ended(other, each.id) for each in made]
        assert [each.request_counts.completed for each in batches] == [15] * 4
        assert sum(len(mesh.asks) for mesh in meshes) == 60
        assert all(mesh.asks for mesh in meshes)


async def test_a_lost_lease_writes_nothing(model: ServedModel, tmp_path: Path) -> None:
    """If a frontend loses its lease, its later results are discarded, and each line is in the output once."""
    mesh = answering(model, step_s=0.02)
    async with running_apps([model], mesh, tmp_path, apps=AppSettings(batches=QUICK), instance_id="a") as first:
        async with openai_client(first.url) as client:
            made = await start_batch(client, jsonl(chat_line(i) for i in range(30)))
            async with asyncio.timeout(PATIENCE_S):
                while await completed(client, made.id) < 4:
                    await asyncio.sleep(0.02)
            with sqlite3.connect(tmp_path / "batches" / "batches.sqlite") as connection:
                connection.execute("UPDATE batches SET lease_epoch = lease_epoch + 1, lease_until_s = 0")
            batch = await wait_ended(client, made.id)
            output = await read_lines(client, batch.output_file_id)
            assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(30)]
            assert batch.request_counts.completed == 30


async def test_a_stopping_frontend_hands_over_its_batch(model: ServedModel, tmp_path: Path) -> None:
    """Draining lets lines in flight end, starts no others, and releases the lease."""
    mesh = answering(model, step_s=0.01)
    async with running_apps([model], mesh, tmp_path, apps=SETTINGS, instance_id="a") as first:
        async with openai_client(first.url) as client:
            made = await start_batch(client, jsonl(chat_line(i) for i in range(60)))
            async with asyncio.timeout(PATIENCE_S):
                while await completed(client, made.id) < 4:
                    await asyncio.sleep(0.02)
        await first.pipeline.drain()
        assert not mesh.cancelled
    async with (
        running_apps([model], answering(model), tmp_path, apps=SETTINGS, instance_id="b") as second,
        openai_client(second.url) as client,
    ):
        batch = await wait_ended(client, made.id)
        output = await read_lines(client, batch.output_file_id)
        assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(60)]
        assert len(mesh.asks) + len(second.mesh.asks) == 60


async def test_files_and_batches_are_listed_in_pages(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """Lists have the newest first, and the pages together are complete. Invalid parameters give a 400."""
    made = [await start_batch(client, jsonl([chat_line(i)])) for i in range(5)]
    listed = [each.id async for each in client.batches.list(limit=2)]
    assert listed == [each.id for each in reversed(made)]
    for each in made:
        await wait_ended(client, each.id)
    inputs = [each.id async for each in client.files.list(limit=2, purpose="batch")]
    assert inputs == [each.input_file_id for each in reversed(made)]
    everything = [each async for each in client.files.list(order="asc")]
    assert Counter(each.purpose for each in everything) == {"batch": 5, "batch_output": 5}
    assert [each.created_at for each in everything] == sorted(each.created_at for each in everything)
    for path in ("/v1/files?limit=0", "/v1/files?order=x", "/v1/files?after=x", "/v1/files?purpose=vision",
                 "/v1/files?x=1", "/v1/batches?limit=101", "/v1/batches?after=x"):  # fmt: skip
        assert (await running.call("GET", path))[0] == 400


async def hang(_: Generation, sent: int) -> None:
    await asyncio.Event().wait()


async def test_files_are_stored_unchanged_and_deleted(running: RunningApps, client: openai.AsyncOpenAI) -> None:
    """Bytes, names and sizes are unchanged. A file that a batch uses cannot be deleted."""
    data = os.urandom(3_000_000)
    file = await client.files.create(
        file=("näme.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (file.bytes, file.filename, file.purpose) == (3_000_000, "näme.jsonl", "batch")
    assert file.expires_at == file.created_at + 7200
    assert (await client.files.retrieve(file.id)).model_dump() == file.model_dump()
    assert (await client.files.content(file.id)).content == data
    assert (await client.files.delete(file.id)).deleted
    for attempt in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            await attempt
    running.mesh.before_step = hang
    made = await start_batch(client, jsonl(chat_line(i) for i in range(8)))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.delete(made.input_file_id)
    assert caught.value.code == "file_in_use"
    await client.batches.cancel(made.id)
    await wait_ended(client, made.id)
    assert (await client.files.delete(made.input_file_id)).deleted


async def test_bad_uploads_and_batches_give_an_error_with_the_field(
    running: RunningApps, client: openai.AsyncOpenAI
) -> None:
    """Invalid forms and bodies give an error that names the field."""
    forms: list[tuple[dict[str, Any], str | None]] = [
        ({"purpose": "batch"}, "file"), ({"file": io.BytesIO(b"x")}, "purpose"),
        ({"file": io.BytesIO(b"x"), "purpose": "vision"}, "purpose"),
        ({"file": io.BytesIO(b"x"), "purpose": "batch", "other": "1"}, "other"),
        ({"file": io.BytesIO(b"x"), "purpose": "batch", "expires_after[anchor]": "x"}, "expires_after.anchor"),
        ({"file": io.BytesIO(b"x"), "purpose": "batch", "expires_after[anchor]": "created_at",
          "expires_after[seconds]": "1"}, "expires_after.seconds"),
    ]  # fmt: skip
    for values, field in forms:
        form = aiohttp.FormData(values, default_to_multipart=True)
        async with running.session.post(running.url + "/v1/files", data=form) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["param"]) == (400, field), answer
    for data, kind in ((b"x", "text/plain"), (b"--x\r\nnothing", "multipart/form-data; boundary=x")):
        status, _, _ = await running.call("POST", "/v1/files", data, headers={"Content-Type": kind})
        assert status == 400
    file = await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, status, field in (
        ({"input_file_id": None}, 400, "input_file_id"), ({"input_file_id": "../../etc/passwd"}, 400, "input_file_id"),
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"), ({"endpoint": None}, 400, "endpoint"),
        ({"completion_window": "1y"}, 400, "completion_window"), ({"completion_window": "999d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"), ({"x": 1}, 400, "x"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
    ):  # fmt: skip
        got, answer, _ = await running.call("POST", "/v1/batches", {**good, **change})
        assert (got, answer["error"]["param"]) == (status, field), answer
    for path in ("/v1/batches/x", "/v1/files/x", "/v1/files/..%2Fbatches.sqlite/content"):
        assert (await running.call("GET", path))[0] == 404


async def test_expired_files_and_batches_are_swept(model: ServedModel, tmp_path: Path) -> None:
    """A sweep removes rows and bytes of expired files and batches."""
    async with running_apps([model], answering(model), tmp_path, apps=SETTINGS) as running:
        async with openai_client(running.url) as client:
            await wait_ended(client, (await start_batch(client, jsonl([chat_line(1)]))).id)
    assert len(list_files(tmp_path / "batches" / "files")) == 2
    with sqlite3.connect(tmp_path / "batches" / "batches.sqlite") as connection:
        connection.execute("UPDATE files SET expires_s = 1")
        connection.execute("UPDATE batches SET ended_s = 1")
    async with running_apps([model], answering(model), tmp_path, apps=SETTINGS) as running:
        async with asyncio.timeout(PATIENCE_S):
            # The sweep deletes the files first, then the batches.
            while (await running.call("GET", "/v1/batches"))[1]["data"]:
                await asyncio.sleep(0.02)
        assert not list_files(tmp_path / "batches" / "files")


async def test_an_unwritable_state_directory_disables_only_batches(model: ServedModel, tmp_path: Path) -> None:
    """Files and batches are disabled and their routes give the error `batches_off`. Other requests work."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    async with running_apps([model], answering(model), blocked) as running:
        status, answer, _ = await running.call("GET", "/v1/files")
        assert (status, answer["error"]["code"]) == (404, "batches_off")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "5"}]}
        assert (await running.call("POST", CHAT, body))[0] == 200


async def test_two_batches_take_turns(model: ServedModel, tmp_path: Path) -> None:
    """A short batch does not wait for the end of a long one that came first."""
    async with (
        running_apps([model], answering(model, hangs_from=99), tmp_path, apps=SETTINGS) as running,
        openai_client(running.url) as client,
    ):
        # Its last line does not end.
        long = await start_batch(client, jsonl(chat_line(i) for i in range(100)))
        short = await start_batch(client, jsonl(chat_line(i) for i in range(3)))
        assert (await wait_ended(client, short.id)).status == "completed"
        assert (await client.batches.retrieve(long.id)).status == "in_progress"
        await client.batches.cancel(long.id)
        await wait_ended(client, long.id)
