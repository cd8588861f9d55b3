"""Runs the commands for backup and restore in docs/deploy/README.md on stores that are in use."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from services.frontend.models import ServedModel
from services.frontend.settings import StoresSettings
from tests.batch_process import QUICK, answering
from tests.frontend_apps import AppSettings, running_apps
from tests.frontend_mesh import served_model, write_model
from tests.postgres import PASSWORD, Cluster, postgres_cluster

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deploy" / "README.md"
SIZE = (1 << 20) + 7


def commands(heading: str, purpose: str) -> str:
    """Returns the code block of a section whose first line states its purpose."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n##")[0]
    [found] = [
        each for each in re.findall(r"```bash\n(.*?)```", section, re.DOTALL) if each.startswith(f"# {purpose}\n")
    ]
    return found.replace(".venv/bin/python", sys.executable)


async def run(script: str, environment: dict[str, str]) -> None:
    """Runs commands like an operator, and stops at the first failure."""
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with postgres_cluster() as cluster:
        yield cluster


@asynccontextmanager
async def client_of(model: ServedModel, directory: Path, stores: StoresSettings) -> AsyncIterator[openai.AsyncOpenAI]:
    apps = AppSettings(batches=QUICK, stores=stores)
    async with (
        running_apps([model], answering(model), directory, apps=apps) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def fill(client: openai.AsyncOpenAI) -> tuple[str, str]:
    """Stores a file of several parts and a response."""
    file = await client.files.create(file=("in.jsonl", b"z" * SIZE), purpose="batch")
    return file.id, (await client.responses.create(model="tiny", input="number 5")).id


async def check(client: openai.AsyncOpenAI, file_id: str, response_id: str) -> None:
    assert (await client.files.content(file_id)).read() == b"z" * SIZE
    more = await client.responses.create(model="tiny", input="number 6", previous_response_id=response_id)
    assert more.output_text == "answer 6"


async def test_sqlite(model: ServedModel, tmp_path: Path) -> None:
    """Backs up the stores of a running frontend and restores them. Data that was stored after the backup is not restored."""
    state, backup = tmp_path / "state", tmp_path / "backup"
    environment = {**os.environ, "STATE": str(state), "BACKUP": str(backup)}
    async with client_of(model, state, StoresSettings()) as client:
        stored = await fill(client)
        await run(commands("SQLite", "backup"), environment)
        later = await fill(client)
    await run(commands("SQLite", "restore"), environment)
    assert all(path.stat().st_mode & 0o077 == 0 for path in backup.rglob("*") if path.is_file())
    async with client_of(model, state, StoresSettings()) as client:
        await check(client, *stored)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(later[0])


async def test_postgres(model: ServedModel, tmp_path: Path, server: Cluster) -> None:
    """Backs up a database in use and restores it into another one."""
    (tmp_path / "password").write_text(PASSWORD)
    first, second = (
        StoresSettings(url=server.new_database(), password_file=str(tmp_path / "password"), timeout_s=30.0)
        for _ in range(2)
    )
    path = f"{server.binary.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "BACKUP": str(tmp_path), "PGPASSWORD": PASSWORD}
    async with client_of(model, tmp_path / "one", first) as client:
        stored = await fill(client)
        await run(commands("PostgreSQL", "backup"), {**environment, "STORES_URL": first.url})
        later = await fill(client)
    await run(commands("PostgreSQL", "restore"), {**environment, "STORES_URL": second.url})
    async with client_of(model, tmp_path / "two", second) as client:
        await check(client, *stored)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(later[0])
