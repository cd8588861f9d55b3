"""Hostile uploads: names that are paths, endless forms, ids that are paths."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from yarl import URL

from services.frontend.models import ServedModel
from tests.frontend_apps import RunningApps, running_apps
from tests.frontend_mesh import FakeMesh
from tests.patience import PATIENCE_S
from tests.security.rig import head_of
from tests.work import at_most_lines

LINES_MAX = 300_000
"""Ten times as many as the most expensive of these forms takes. 2 MB of empty lines, read one by one, take 100 million."""
BOUNDARY = "xxx"
KIND = f"multipart/form-data; boundary={BOUNDARY}"
PATHS = (
    "..%2F..%2Fetc%2Fpasswd", "..%5C..%5Csecret", "%2e%2e%2fbatches.sqlite", "file-..%2f..", "%00", "file-%00", "." * 300,
    "batches.sqlite", "%2Fetc%2Fpasswd",
)  # fmt: skip


@pytest.fixture
async def apps(model: ServedModel, tmp_path: Path) -> AsyncIterator[RunningApps]:
    async with running_apps([model], FakeMesh(answer=lambda _: [3, 2]), tmp_path / "data") as running:
        yield running


def part(name: str, data: bytes, *, filename: str = "") -> bytes:
    more = f'; filename="{filename}"' if filename else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + data + b"\r\n"


async def post(apps: RunningApps, body: bytes, kind: str = KIND) -> tuple[int, dict[str, object]]:
    url = f"{apps.url}/v1/files"
    async with apps.session.post(url, data=io.BytesIO(body), headers={"Content-Type": kind}) as response:
        return response.status, json.loads(await response.read())


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["../../../evil.jsonl", "/tmp/evil.jsonl", "..\\evil", "a\x01b", "é" * 400])
async def test_the_name_of_a_file_is_only_a_label(apps: RunningApps, tmp_path: Path, name: str) -> None:
    """A file's name is not used as a path. Its bytes are stored under the frontend's own id."""
    before = written(tmp_path)
    body = part("purpose", b"batch") + part("file", b"{}\n", filename=name) + f"--{BOUNDARY}--\r\n".encode()
    status, answer = await post(apps, body)
    assert status in (200, 400), answer
    made = {Path(path) for path in written(tmp_path) - before if "sqlite" not in path}
    assert all(path.parts[0] == "data" and path.name == answer.get("id") for path in made), made
    assert (status == 200) == bool(made)


@pytest.mark.parametrize("path", PATHS)
async def test_an_id_cannot_be_a_path(apps: RunningApps, path: str) -> None:
    for method, rest in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        url = f"{apps.url}/v1/files/{path}{rest}"
        async with apps.session.request(method, URL(url, encoded=True)) as response:
            assert response.status in (400, 404), (method, url, response.status)
            assert b"root:" not in await response.read()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(part("purpose", b"batch") * 10_000, KIND, id="ten thousand parts"),
        pytest.param(part("purpose", b"x" * 2_000_000), KIND, id="a long field"),
        pytest.param(b"--xxx\r\n" + b"X-Y: z\r\n" * 100_000, KIND, id="heads without end"),
        pytest.param(b"--xxx\r\nX-Y: " + b"z" * 2_000_000, KIND, id="a head without end"),
        pytest.param(b"--yyy\r\n" * 200_000, KIND, id="another boundary"),
        pytest.param(
            b'--xxx\r\nContent-Type: multipart/mixed; boundary="xxx"\r\n\r\n' * 5000, KIND, id="forms in forms"
        ),
        pytest.param(b"\n" * 2_000_000, KIND, id="empty lines"),
        pytest.param(b"--\r\n" * 1000, "multipart/form-data; boundary=", id="no boundary"),
        pytest.param(b"--xxx\r\n", f"multipart/form-data; boundary={'b' * 4000}", id="a long boundary"),
    ],
)
async def test_hostile_forms_are_a_client_error(
    apps: RunningApps, tmp_path: Path, body: bytes, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hostile form gets 400 without a traceback, leaves no file and costs little work. 2 MB of empty lines used to take 8 CPU-seconds."""
    before = written(tmp_path)
    with at_most_lines(LINES_MAX):
        status, answer = await post(apps, body, kind)
    assert status == 400, answer
    assert {path for path in written(tmp_path) - before if "sqlite" not in path} == set()
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_incomplete_form_creates_no_file(apps: RunningApps) -> None:
    """If the client closes the connection within a form, no file is created."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(apps.url.rpartition(":")[2]))
    try:
        writer.write(head_of("/v1/files", Content_Type=KIND, Content_Length="1000") + b"--xxx\r\n")
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            assert b"HTTP/1.1 200" not in await reader.read()
    finally:
        writer.close()
