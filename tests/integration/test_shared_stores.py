"""Frontends on several machines share a real PostgreSQL, which tests kill, stop, fill and slow down."""

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import openai
import psycopg
import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import UnavailableError
from services.frontend.models import ServedModel
from services.frontend.settings import StoresSettings
from services.frontend.stores.database import DatabaseConnection, StoreClock
from services.frontend.stores.postgres import PostgresDatabase
from services.frontend.stores.postgres_schema import MIGRATIONS
from tests.batch_process import QUICK, answering
from tests.frontend_apps import AppSettings, RunningApps, running_apps
from tests.frontend_mesh import served_model, write_model
from tests.patience import PATIENCE_S
from tests.postgres import CONNECTIONS_MAX, PASSWORD, Cluster, postgres_cluster

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "number 7"}]}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_directory: Path) -> ServedModel:
    return served_model(model_directory)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with postgres_cluster() as cluster:
        yield cluster


@pytest.fixture
def shared(server: Cluster, tmp_path: Path) -> StoresSettings:
    """Settings for an empty database."""
    (tmp_path / "password").write_text(PASSWORD)
    return StoresSettings(url=server.new_database(), password_file=str(tmp_path / "password"), timeout_s=PATIENCE_S)


@asynccontextmanager
async def machine(
    model: ServedModel, directory: Path, name: str, stores: StoresSettings, step_s: float = 0.0
) -> AsyncIterator[tuple[RunningApps, openai.AsyncOpenAI]]:
    """A frontend with a directory of its own, as on another machine, and a client of it."""
    apps = AppSettings(batches=QUICK, stores=stores)
    mesh = answering(model, step_s=step_s)
    async with (
        running_apps([model], mesh, directory / name, apps=apps, instance_id=name) as running,
        client_of(running.url) as client,
    ):
        yield running, client


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def available(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call while the frontend returns `store_unavailable`: some tests have timeouts that a busy database exceeds."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            try:
                return await call()
            except openai.InternalServerError as error:
                if (error.status_code, error.code) != (503, "store_unavailable"):
                    raise
            await asyncio.sleep(0.05)


async def start_batch(client: openai.AsyncOpenAI, lines: int) -> Any:
    body = [
        {"custom_id": f"c{i}", "method": "POST", "url": CHAT,
         "body": {"model": "tiny", "messages": [{"role": "user", "content": f"number {i}"}]}}
        for i in range(lines)
    ]  # fmt: skip
    data = "\n".join(json.dumps(each) for each in body).encode()
    file = await available(lambda: client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch"))
    return await available(lambda: client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))


async def wait_for_lines(client: openai.AsyncOpenAI, batch_id: str, lines: int) -> Any:
    """Waits until so many lines have a result, or the batch has ended."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            batch = await available(lambda: client.batches.retrieve(batch_id))
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            if batch.request_counts is not None and batch.request_counts.completed >= lines:
                return batch
            await asyncio.sleep(0.05)


async def check_output(client: openai.AsyncOpenAI, batch: Any, lines: int) -> None:
    """Checks that the output has every line once, in order, with its own answer."""
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", lines, 0)
    content = await available(lambda: client.files.content(batch.output_file_id))
    output = [json.loads(line) for line in content.text.splitlines()]
    assert [each["custom_id"] for each in output] == [f"c{i}" for i in range(lines)]
    texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in output]
    assert texts == [f"answer {i}" for i in range(lines)]


async def test_machines_share_files_batches_and_responses(
    model: ServedModel, tmp_path: Path, shared: StoresSettings, server: Cluster
) -> None:
    """A client may send each call to another machine. No prompt stays in a directory, and no password in the server's log."""
    async with (
        machine(model, tmp_path, "a", shared) as (_, first),
        machine(model, tmp_path, "b", shared) as (_, second),
    ):
        batch = await start_batch(first, 20)
        batch = await wait_for_lines(second, batch.id, 21)
        await check_output(first, batch, 20)
        assert (await first.files.content(batch.input_file_id)).read() == (
            await second.files.content(batch.input_file_id)
        ).read()
        response = await first.responses.create(model="tiny", input="number 1")
        more = await second.responses.create(model="tiny", input="number 2", previous_response_id=response.id)
        assert (await first.responses.retrieve(more.id)).output_text == "answer 2"
        await first.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            await second.files.content(batch.input_file_id)
    left = [path for name in ("a", "b") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert left == []
    assert PASSWORD not in (server.directory / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_frontend_loses_no_batch(
    model_directory: Path,
    model: ServedModel,
    tmp_path: Path,
    shared: StoresSettings,
    server: Cluster,
    number: signal.Signals,
) -> None:
    """Another machine takes over after the lease: every line is in the output once, in order. Lines with a result do not run again.

    A frontend that was only suspended, and continues after the end of the batch, changes nothing of it.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.batch_process", str(model_directory), str(tmp_path / "doomed"), "0.03",
        shared.url, shared.password_file, "--hangs-from", "40",
        stdout=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            url = (await process.stdout.readline()).decode().strip()
        async with client_of(url) as client:
            batch = await start_batch(client, 60)
            await wait_for_lines(client, batch.id, 8)
        process.send_signal(number)
        done = await asyncio.to_thread(server.run, "SELECT line FROM results", shared.url)
        assert len(done) >= 8
        async with machine(model, tmp_path, "b", shared) as (running, client):
            batch = await wait_for_lines(client, batch.id, 61)
            await check_output(client, batch, 60)
            assert not {f"number {line - 1}" for (line,) in done} & {
                text
                for each in running.mesh.generations
                for text in re.findall(r"number \d+", model.text.decode(each.token_ids))
            }
            if number == signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                await wait_idle(running, url)
                assert await client.batches.retrieve(batch.id) == batch
                await check_output(client, batch, 60)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def wait_idle(running: RunningApps, url: str) -> None:
    """Waits until a frontend runs no batch."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with running.session.get(f"{url}/metrics") as response:
                if "kvmesh_frontend_running_batches 0.0" in await response.text():
                    return
            await asyncio.sleep(0.05)


async def test_a_killed_database_loses_and_duplicates_nothing(
    model: ServedModel, tmp_path: Path, shared: StoresSettings, server: Cluster
) -> None:
    """The database is killed in the middle of a batch of two frontends. Meanwhile chats are answered, and requests that need the store get a
    503 with Retry-After."""
    quick = replace(shared, timeout_s=1.0)
    async with (
        machine(model, tmp_path, "a", quick, 0.02) as (one, client),
        machine(model, tmp_path, "b", quick, 0.02) as (two, other),
    ):
        batch = await start_batch(client, 60)
        await wait_for_lines(client, batch.id, 6)
        await asyncio.to_thread(server.kill)
        try:
            for running in (one, two):
                assert (await running.call("POST", CHAT, ASK))[0] == 200
                status, body, headers = await running.call("GET", f"/v1/batches/{batch.id}")
                assert (status, body["error"]["code"]) == (503, "store_unavailable")
                assert headers["Retry-After"]
                assert "kvmesh" not in body["error"]["message"] and "127.0.0.1" not in body["error"]["message"]
        finally:
            await server.start_again()
        batch = await wait_for_lines(client, batch.id, 61)
        await check_output(other, batch, 60)


async def test_a_restart_within_the_time_out_fails_no_call(
    model: ServedModel, tmp_path: Path, shared: StoresSettings, server: Cluster
) -> None:
    """Idle connections that broke are replaced, and the call is retried."""
    async with machine(model, tmp_path, "a", shared) as (_running, client):
        response = await client.responses.create(model="tiny", input="number 1")
        await asyncio.to_thread(server.stop)
        await server.start_again()
        assert (await client.responses.retrieve(response.id)).output_text == "answer 1"


async def test_calls_to_a_hanging_database_time_out(
    model: ServedModel, tmp_path: Path, shared: StoresSettings, server: Cluster
) -> None:
    """After SIGSTOP the kernel still accepts connections and data. Calls end after their timeout, and work again after SIGCONT."""
    quick = StoresSettings(url=shared.url, password_file=shared.password_file, timeout_s=0.5)
    async with machine(model, tmp_path, "a", quick) as (running, client):
        async with asyncio.timeout(PATIENCE_S):
            while (await running.call("GET", "/v1/files"))[0] != 200:
                await asyncio.sleep(0.05)
        server.signal_all(signal.SIGSTOP)
        try:
            async with asyncio.timeout(PATIENCE_S):
                calls = [running.call("GET", "/v1/files") for _ in range(20)]
                assert {status for status, _, _ in await asyncio.gather(*calls)} == {503}
                assert (await running.call("POST", CHAT, ASK))[0] == 200
        finally:
            server.signal_all(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            while (await running.call("GET", "/v1/files"))[0] != 200:
                await asyncio.sleep(0.05)
        batch = await start_batch(client, 3)
        await check_output(client, await wait_for_lines(client, batch.id, 4), 3)


async def test_a_server_without_free_connections_is_503(
    model: ServedModel, tmp_path: Path, shared: StoresSettings, server: Cluster
) -> None:
    """Other programs hold all connections. When they close them, the frontend's calls work again."""
    quick = StoresSettings(url=shared.url, password_file=shared.password_file, timeout_s=0.5)
    others: list[psycopg.Connection[Any]] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(others) < CONNECTIONS_MAX:
                try:
                    others.append(psycopg.connect(server.url(), password=PASSWORD))
                except psycopg.OperationalError:
                    # Connections of earlier tests have not ended yet.
                    await asyncio.sleep(0.05)
        async with machine(model, tmp_path, "a", quick) as (running, _):
            status, body, _ = await running.call("GET", "/v1/files")
            assert (status, body["error"]["code"]) == (503, "store_unavailable")
            for each in others:
                each.close()
            async with asyncio.timeout(PATIENCE_S):
                while (await running.call("GET", "/v1/files"))[0] != 200:
                    await asyncio.sleep(0.05)
    finally:
        for each in others:
            each.close()


async def test_a_full_disk_gives_503_and_leaves_no_partial_file(
    model: ServedModel, tmp_path: Path, shared: StoresSettings, server: Cluster
) -> None:
    """The server cannot extend its tables. Uploads fail with `store_unavailable`, and stored files stay readable."""
    limit = 24 << 20  # Larger than a segment of the write-ahead log, which the server must still write.
    async with machine(model, tmp_path, "a", shared) as (_running, client):
        small = await client.files.create(file=("small", os.urandom(1000)), purpose="batch")
        await asyncio.to_thread(server.stop)
        await server.start_again(file_bytes_max=limit)
        with pytest.raises(openai.InternalServerError) as failure:  # noqa: PT012 (the first upload without room)
            for _ in range(6):
                await client.files.create(file=("large", os.urandom(8 << 20)), purpose="batch")
        assert (failure.value.status_code, failure.value.code) == (503, "store_unavailable")
        listed = [each.id async for each in await available(client.files.list)]
        assert len((await client.files.content(small.id)).read()) == 1000
        parts = await asyncio.to_thread(server.run, "SELECT DISTINCT file_id FROM contents", shared.url)
        assert {each for (each,) in parts} == set(listed)
        for each in listed:
            await client.files.delete(each)
    await asyncio.to_thread(server.stop)
    await server.start_again()


async def test_frontends_that_start_at_once_migrate_once(shared: StoresSettings, server: Cluster) -> None:
    """Several frontends start on an empty database, which is unreachable at first. The migration runs once."""
    await asyncio.to_thread(server.stop)
    databases = [PostgresDatabase(shared, MIGRATIONS, SystemClock()) for _ in range(6)]
    opening = [asyncio.create_task(database.open()) for database in databases]
    try:
        await server.start_again()
        await asyncio.gather(*opening)
        await asyncio.gather(*(database.call(count_files, True) for database in databases))
        assert await asyncio.to_thread(server.run, "SELECT version FROM kvmesh_schema", shared.url) == [(1,)]
    finally:
        for database in databases:
            await database.aclose()


async def count_files(connection: DatabaseConnection) -> int:
    row = await connection.row("SELECT count(*) AS count FROM files")
    assert row is not None
    return int(row["count"])


async def test_tables_of_a_later_version_are_refused(shared: StoresSettings, server: Cluster) -> None:
    """An old frontend does not start on tables of a later version."""
    await asyncio.to_thread(server.run, "CREATE TABLE kvmesh_schema (version BIGINT NOT NULL)", shared.url)
    await asyncio.to_thread(server.run, "INSERT INTO kvmesh_schema VALUES (99)", shared.url)
    database = PostgresDatabase(shared, MIGRATIONS, SystemClock())
    with pytest.raises(UnavailableError) as failure:
        await database.open()
    assert failure.value.reason == "store_too_new"
    await database.aclose()


async def test_machines_with_different_clocks_agree(shared: StoresSettings) -> None:
    """Stores use the database's time, so that a lease ends at the same moment for all machines."""

    class Skewed(SystemClock):
        def __init__(self, skew_s: float) -> None:
            self.skew_s = skew_s

        def wall(self) -> float:
            return super().wall() + self.skew_s

    times = []
    for skew_s in (-3600.0, 0.0, 7200.0):
        clock = Skewed(skew_s)
        database = PostgresDatabase(shared, MIGRATIONS, clock)
        await database.open()
        times.append(StoreClock(clock, database).wall() - SystemClock().wall())
        await database.aclose()
    assert max(map(abs, times)) < 30.0


async def test_a_deadlocked_transaction_is_retried(shared: StoresSettings) -> None:
    """PostgreSQL aborts one of two transactions that wait for each other. Its call succeeds nevertheless."""
    database = PostgresDatabase(shared, MIGRATIONS, SystemClock())
    await database.open()
    begun = [asyncio.Event(), asyncio.Event()]
    runs = []

    async def work(connection: DatabaseConnection, mine: int) -> None:
        runs.append(mine)
        await connection.lock(f"row {mine}")
        begun[mine].set()
        await begun[1 - mine].wait()
        await connection.lock(f"row {1 - mine}")

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(database.call(lambda c, n=n: work(c, n), False) for n in (0, 1)))
    assert len(runs) == 3
    await database.aclose()


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("postgresql://kvmesh:secret@h/d", "password"),
        ("postgresql://h/d?password=secret", "password"),
        ("mysql://h/d", "postgresql://"),
    ],
)
def test_urls_that_are_refused(url: str, word: str) -> None:
    """The settings reject the URL before any connection. The error does not repeat the secret."""
    with pytest.raises(ValueError, match=word) as failure:
        StoresSettings(url=url)
    assert "secret" not in str(failure.value)


async def test_meshes_share_a_database_by_schemas(shared: StoresSettings, server: Cluster, tmp_path: Path) -> None:
    """With options in the URL, each mesh has its tables in its own schema."""
    for name in ("one", "two"):
        await asyncio.to_thread(server.run, f"CREATE SCHEMA {name}", shared.url)
        url = f"{shared.url}?options=-csearch_path%3D{name}"
        database = PostgresDatabase(replace(shared, url=url), MIGRATIONS, SystemClock())
        await database.open()
        assert await database.call(count_files, True) == 0
        await database.aclose()
        assert await asyncio.to_thread(server.run, f"SELECT version FROM {name}.kvmesh_schema", shared.url) == [(1,)]


async def test_a_wrong_password_is_logged(
    shared: StoresSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The frontend starts, calls are refused, and the log has PostgreSQL's reason, but never the password."""
    (tmp_path / "password").write_text("not-the-right-one")
    database = PostgresDatabase(replace(shared, timeout_s=0.5), MIGRATIONS, SystemClock())
    await database.open()
    with pytest.raises(UnavailableError) as failure:
        await database.call(count_files, True)
    assert failure.value.reason == "store_unavailable"
    async with asyncio.timeout(PATIENCE_S):
        # The attempt to connect may take longer than a call.
        while "password authentication failed" not in caplog.text:
            await asyncio.sleep(0.05)
    await database.aclose()
    assert "not-the-right-one" not in caplog.text and "not-the-right-one" not in failure.value.message
