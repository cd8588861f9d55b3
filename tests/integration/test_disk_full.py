"""A mesh whose frontend stores its state on a disk that becomes full: it reports the error, keeps stored data, and recovers when there is
space."""

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.integration.mesh import RunningMesh, argv_simulated, chat, running_mesh, wait_until
from tests.patience import PATIENCE_S

LINES = 24
SMALL_DISK = 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"'
ENGINE = "--engine-args=--simulated-time-factor 1 --simulated-profile-base-s 0.01"
FULL = (503, "disk_full")


def small_disk(folder: Path) -> tuple[str, ...]:
    """Returns the words before a command that runs it with a disk of 4 MiB at the folder. Skips the test where that is not allowed."""
    namespace = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(folder))
    done = subprocess.run([*namespace, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk of its own: {done.stderr.strip()}")
    return namespace


@dataclass(slots=True)
class Client:
    """Calls the frontend over HTTP."""

    mesh: RunningMesh
    session: aiohttp.ClientSession

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Returns the status, and the code of the error or the body."""
        async with self.session.request(method, f"{self.mesh.url}/v1/{path}", **options) as response:
            data = await response.read()
            if path.endswith("/content"):
                return response.status, data
            body = orjson.loads(data)
            return response.status, body["error"]["code"] if response.status >= 400 else body

    async def upload(self, data: bytes) -> tuple[int, Any]:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", data, filename="lines.jsonl")
        return await self.call("POST", "files", data=form)

    async def respond(self, text: str, tokens: int = 2) -> tuple[int, Any]:
        body = {"model": "demo", "input": text, "max_output_tokens": tokens, "store": True}
        return await self.call("POST", "responses", json=body)

    async def batch(self, batch_id: str) -> Any:
        status, body = await self.call("GET", f"batches/{batch_id}")
        assert status == 200, body
        return body


def lines() -> bytes:
    """Returns a batch of chats that take some time."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 40}
    each = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return b"\n".join(orjson.dumps({"custom_id": f"line-{number}", **each}) for number in range(LINES))


def fill(disk: Path) -> Path:
    """Writes a file until the disk is full."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


async def refuses(client: Client) -> bool:
    """Returns whether there is no space for another response. Raises AssertionError on any other failure."""
    answer = await client.respond("full " * 800)
    assert answer[0] == 200 or answer == FULL, answer
    return answer == FULL


async def test_a_full_disk_loses_no_stored_data(tmp_path: Path) -> None:
    """Chats continue. Requests that need space get 503 `disk_full`. A running batch waits, and each of its lines runs exactly once."""
    folder = tmp_path / "state"
    folder.mkdir()
    argv = (
        "--no-planner",
        ENGINE,
        f"--frontend-args=--state-dir {folder} --batches-lease-s 1 --batches-lines-in-flight-max 2",
    )
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        running_mesh(tmp_path, *argv_simulated(*argv), prefix=small_disk(folder)) as mesh,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        client = Client(mesh, session)
        _, kept = await client.respond("before")
        status, file = await client.upload(lines())
        assert status == 200, file
        work = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        _, batch = await client.call("POST", "batches", json=work)

        async def has_begun() -> bool:
            return int((await client.batch(batch["id"]))["request_counts"]["completed"]) > 0

        await wait_until(has_begun, PATIENCE_S, mesh.logs())
        filler = fill(Path(f"/proc/{mesh.process.pid}/root{folder}"))

        # The database's log still has space for a few pages.
        await wait_until(lambda: refuses(client), PATIENCE_S, mesh.logs())
        assert await client.upload(bytes(200_000)) == FULL
        assert await client.call("GET", f"files/{file['id']}/content") == (200, lines())
        assert (await client.call("GET", f"responses/{kept['id']}"))[1]["output"] == kept["output"]
        assert (await chat(mesh.url, "still there", max_tokens=2))["usage"]
        log = mesh.directory / "gateway-0.log"
        await wait_until(lambda: "batch_failed_for_now" in log.read_text(), PATIENCE_S, mesh.logs())
        # The waiting batch may be about to fail again, and removes its file after that.
        await wait_until(lambda: not list(filler.parent.rglob("*.part*")), PATIENCE_S, "unfinished files are removed")

        filler.unlink()

        async def is_over() -> bool:
            return (await client.batch(batch["id"]))["status"] in ("completed", "failed")

        await wait_until(is_over, PATIENCE_S, mesh.logs())
        ended = await client.batch(batch["id"])
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", LINES), (ended, mesh.logs())
        _, output = await client.call("GET", f"files/{ended['output_file_id']}/content")
        done = [orjson.loads(line)["custom_id"] for line in output.splitlines()]
        assert sorted(done) == sorted(f"line-{number}" for number in range(LINES))
        assert (await client.upload(bytes(200_000)))[0] == 200
        assert (await client.respond("after"))[0] == 200
