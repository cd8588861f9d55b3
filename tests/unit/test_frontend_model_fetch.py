"""A frontend without a model's files fetches them from a worker over gRPC, and never tokenises with the files of another model."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.core import ModelCard
from kvmesh.discovery.base import Health, Instance
from kvmesh.errors import MeshError, NotFoundError, OverloadedError, UnavailableError
from kvmesh.model_files import digest_of_files, list_files
from kvmesh.rpc.worker_client import GrpcWorkerClient
from kvmesh.worker.model_files import STREAMS_MAX, ServedFiles
from services.frontend.model_cards import WorkerCard, by_digest, read_card
from services.frontend.settings import ModelSettings
from services.frontend.text.model_directories import ModelDirectories
from tests.frontend_mesh import write_model
from tests.patience import PATIENCE_S
from tests.worker_rig import SLOW, WorkerRig, running_worker

CODE = "raise SystemExit('code of a model ran')"


def write_files(directory: Path, template: str = "") -> Path:
    """Writes a model with code beside its files, and with a tokenizer file that needs several messages."""
    write_model(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 512}))
    (directory / "vocab.txt").write_text("x" * (3 << 20))
    (directory / "tokenizer.py").write_text(CODE)
    (directory / "model.safetensors").write_text("weights")
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@asynccontextmanager
async def worker_of(directory: Path, kind: str = "grpc") -> AsyncIterator[tuple[WorkerRig, ModelCard]]:
    """Runs a worker of the model in `directory`. Yields its rig and its card as the frontend reads it."""
    async with running_worker(kind, engine=replace(SLOW, vocabulary_size=0, model_dir=str(directory))) as rig:
        description = await GrpcWorkerClient(rig.channels).describe(rig.address, timeout_s=PATIENCE_S)
        yield rig, description.model


def instance(rig: WorkerRig, name: str = "w1", role: str = "decode", epoch: int = 1) -> Instance:
    host, _, port = rig.address.rpartition(":")
    return listed(name, role=role, epoch=epoch, host=host, port=int(port))


def listed(name: str, *, role: str = "decode", epoch: int = 1, host: str = "127.0.0.1", port: int = 1) -> Instance:
    meta = {"role": role, "epoch": str(epoch)}
    return Instance(
        service="kvmesh-decode", instance_id=name, host=host, port=port, meta=meta, tags=(), health=Health.PASSING,
        is_draining=False,
    )  # fmt: skip


def directories(rig: WorkerRig, root: Path) -> ModelDirectories:
    settings = ModelSettings(files_dir=str(root), fetch_timeout_s=PATIENCE_S)
    return ModelDirectories(settings, GrpcWorkerClient(rig.channels), SystemClock())


@pytest.mark.parametrize("kind", ["grpc", "memory"])
async def test_missing_files_are_fetched_from_a_worker(kind: str, tmp_path: Path) -> None:
    """The frontend gets all text files unchanged, but neither code nor weights. The second load needs no worker."""
    source = write_files(tmp_path / "worker")
    async with worker_of(source, kind) as (rig, card):
        assert card.files_digest == digest_of_files(list_files(source))
        elsewhere = replace(card, source="/a/path/of/the/worker")
        found = await directories(rig, tmp_path / "cache").find(elsewhere, [instance(rig)])
        files = {path.relative_to(found).as_posix(): path.read_bytes() for path in found.rglob("*") if path.is_file()}
        assert files == {file.name: file.path.read_bytes() for file in list_files(source)}
        assert "vocab.txt" in files and not any(name.endswith((".py", ".safetensors")) for name in files)
        assert await directories(rig, tmp_path / "cache").find(elsewhere, []) == found


async def test_local_files_are_used_only_if_they_match_the_workers(tmp_path: Path) -> None:
    """If the same path has other content, the frontend fetches the worker's files."""
    source, local = write_files(tmp_path / "worker"), write_files(tmp_path / "local")
    async with worker_of(source) as (rig, card):
        here = replace(card, source=str(local))
        found = directories(rig, tmp_path / "cache")
        assert await found.find(here, []) == local
        assert not (tmp_path / "cache").exists()
        (local / "chat_template.jinja").write_text("another template")
        fetched = await found.find(here, [instance(rig)])
        assert (fetched / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()


async def test_the_error_names_the_path_and_the_workers_errors(tmp_path: Path) -> None:
    """The error has the missing path and the error of each worker."""
    source = write_files(tmp_path / "worker")
    async with worker_of(source) as (rig, card):
        wanted = replace(card, source="/models/missing", files_digest="0" * 64)
        with pytest.raises(UnavailableError) as caught:
            await directories(rig, tmp_path / "cache").find(wanted, [instance(rig), listed("gone")])
        message = caught.value.message
        assert "/models/missing is neither a directory here" in message
        assert f"worker w1 at {rig.address}" in message and card.files_digest in message
        assert "worker gone at 127.0.0.1:1" in message
        assert caught.value.reason == "model_files_unavailable"


async def test_files_that_changed_after_the_start_are_not_used(tmp_path: Path) -> None:
    """A worker refuses to send files that changed after its start. The frontend then tries the next worker."""
    source, other = write_files(tmp_path / "worker"), write_files(tmp_path / "other")
    async with worker_of(source) as (rig, card), worker_of(other) as (second, same):
        assert same.files_digest == card.files_digest
        (source / "config.json").write_text(json.dumps({"vocab_size": 7}))
        wanted, found = replace(card, source="/missing"), directories(rig, tmp_path / "cache")
        with pytest.raises(UnavailableError, match="restart"):
            await found.find(wanted, [instance(rig)])
        assert await found.find(wanted, [instance(rig), instance(second, "w2")])


async def test_a_worker_limits_concurrent_streams(tmp_path: Path) -> None:
    """A stream beyond the limit is refused. A closed stream frees its place."""
    files = ServedFiles(lambda: _card(write_files(tmp_path)))
    await files.start()
    streams = [files.parts(files.digest) for _ in range(STREAMS_MAX)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(OverloadedError):
        await anext(files.parts(files.digest))
    await streams[0].aclose()  # type: ignore[attr-defined]
    assert (await anext(files.parts(files.digest))).name == "chat_template.jinja"
    with pytest.raises(NotFoundError):
        await anext(files.parts("0" * 64))


async def test_a_worker_without_files_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker whose files are missing, or include a link to a file elsewhere, logs a warning and serves no files."""
    (tmp_path / "secret").write_text("key")
    model = write_files(tmp_path / "model")
    (model / "chat_template.json").symlink_to(tmp_path / "secret")
    for card in (_card(tmp_path / "missing"), _card(model)):
        files = ServedFiles(lambda card=card: card)  # type: ignore[misc]
        with caplog.at_level(logging.WARNING):
            await files.start()
        assert files.digest == ""
        with pytest.raises(NotFoundError, match="no files"):
            await anext(files.parts(""))
    # The garbage collector may log about objects of other tests.
    logged = [record.message for record in caplog.records if record.name.startswith("kvmesh.")]
    assert logged == ["model_files_not_served"] * 2


async def test_a_card_without_a_digest_needs_local_files(tmp_path: Path) -> None:
    """A card without a digest matches any local files, and nothing is fetched from workers."""
    local = write_files(tmp_path / "local")

    class NoWorker:
        async def fetch_model_files(self, address: str, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
            raise AssertionError("nothing is to be fetched")

    found = ModelDirectories(ModelSettings(files_dir=str(tmp_path / "cache")), NoWorker(), SystemClock())
    assert await found.find(_card(local), [listed("w1")]) == local
    with pytest.raises(MeshError, match="missing"):
        await found.find(_card(tmp_path / "missing"), [listed("w1")])


def _card(source: Path) -> ModelCard:
    return ModelCard(name="demo", source=str(source), context_tokens_max=512, vocabulary_size=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Workers as (name, role, epoch, digest)."""

    workers: tuple[tuple[str, str, int, str], ...]

    def grouped(self) -> list[list[str]]:
        described = [
            (listed(name, role=role, epoch=epoch), _worker_card(digest)) for name, role, epoch, digest in self.workers
        ]
        return [[each.instance_id for each, _ in group] for group in by_digest(described)]


def _worker_card(digest: str) -> WorkerCard:
    return WorkerCard(name="m", source="m", context_tokens_max=1, vocabulary_size=1, files_digest=digest)


def test_the_files_of_most_decode_workers_are_preferred() -> None:
    """The files of most decode workers are used; of equal groups, those of the newest worker. Groups without a decode worker do not count."""
    old, new = ("d1", "decode", 1, "aa"), ("d2", "decode", 2, "bb")
    prefill = ("p1", "prefill", 9, "aa")
    assert Listing(workers=()).grouped() == []
    assert Listing(workers=(prefill,)).grouped() == []
    assert Listing(workers=(old, new, prefill)).grouped() == [["d2"], ["d1", "p1"]]
    assert Listing(workers=(old, ("d3", "decode", 1, "aa"), new)).grouped() == [["d1", "d3"], ["d2"]]


def test_the_digest_is_parsed_from_the_card() -> None:
    """Cards of workers that serve no files have none."""
    card = {"name": "x", "source": "y", "context_tokens_max": 1, "vocabulary_size": 1}
    assert read_card(json.dumps(card).encode()).files_digest == ""
    assert read_card(json.dumps(card | {"files_digest": "ab"}).encode()).files_digest == "ab"


async def test_concurrent_loads(tmp_path: Path) -> None:
    """Several processes of a frontend start at the same time and fetch the same files."""
    async with worker_of(write_files(tmp_path / "worker")) as (rig, card):
        elsewhere = replace(card, source="/missing")
        async with asyncio.TaskGroup() as tasks:
            found = [
                tasks.create_task(directories(rig, tmp_path / "cache").find(elsewhere, [instance(rig)]))
                for _ in range(STREAMS_MAX)
            ]
        assert len({task.result() for task in found}) == 1
