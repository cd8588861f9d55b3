"""The files that a frontend downloads for a model on the Hugging Face hub. A server on loopback implements the part of the API in use."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00001.safetensors": b"w" * 100_000,
    "README.md": b"words",
}


class Hub(BaseHTTPRequestHandler):
    """Serves one repository, `org/name`, and records the downloaded files."""

    fetched: ClassVar[list[str]] = []

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/revision/"):
            files = [{"rfilename": name} for name in FILES]
            self.send(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": files}).encode(), with_body)
        elif path.startswith("/api/models/org/name/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.send(json.dumps(entries).encode(), with_body)
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            if with_body:
                self.fetched.append(name)
            self.send(FILES[name], with_body, etag=hashlib.sha1(FILES[name]).hexdigest())
        else:
            self.send_error(404)

    def send(self, data: bytes, with_body: bool, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.fetched.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def directory(endpoint: str, cache: Path, source: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Runs `model_directory` in a new process, because the hub's client reads its environment on import."""
    code = (
        "import sys; from services.frontend.text.model_files import model_directory\n"
        "from kvmesh.errors import MeshError\n"
        "try:\n    print(model_directory(sys.argv[1], revision='', cache_dir=sys.argv[2]))\n"
        "except MeshError as error:\n    sys.exit(f'{error.reason}: {error.message}')\n"
    )
    # Variables of the machine, such as HF_HUB_OFFLINE, do not apply.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    limits = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), f"{PATIENCE_S:.0f}")
    own = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, source, str(cache)],
        env={**inherited, **limits, **own, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_only_text_files_of_a_hub_model_are_downloaded(hub: str, tmp_path: Path) -> None:
    """Only the configuration, the tokenizer and the template are downloaded. The next frontend uses the cache."""
    got = directory(hub, tmp_path, "org/name")
    assert got.returncode == 0, got.stderr
    folder = Path(got.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert sorted(Hub.fetched) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert directory("http://127.0.0.1:9", tmp_path, "org/name").stdout == got.stdout


def test_a_hub_that_is_unreachable_or_disabled(tmp_path: Path) -> None:
    """An unreachable hub may become reachable. In offline mode, and for a path that does not exist, nothing is downloaded."""
    away = directory("http://127.0.0.1:9", tmp_path, "org/name")
    assert "model_files_unreachable" in away.stderr
    for source, env in (("org/name", {"HF_HUB_OFFLINE": "1"}), ("/models/absent", {}), ("name", {})):
        assert "model_files_missing" in directory("http://127.0.0.1:9", tmp_path, source, **env).stderr
