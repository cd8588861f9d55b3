"""Decides from which directory a model's text side is loaded: the one that its workers name, or a copy of the files of a worker."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvmesh.clock import Clock
from kvmesh.core import ModelCard
from kvmesh.discovery.base import Instance
from kvmesh.errors import MeshError, UnavailableError, UnsupportedError
from kvmesh.event_log import event_logger
from kvmesh.model_files import digest_of_files, find_directory, list_files
from services.frontend.settings import ModelSettings
from services.frontend.text.file_cache import FileCache
from services.frontend.text.model_files import model_directory

_log = event_logger(__name__)
_WORKERS_TRIED_MAX = 3


class FileSource(Protocol):
    """Fetches a model's files from a worker; `GrpcWorkerClient`."""

    async def fetch_model_files(self, address: str, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        """Returns files with the digest, by name. Raises MeshError."""
        ...


class ModelDirectories:
    """Finds the files of models. A frontend uses its own files only if they are the worker's."""

    def __init__(self, settings: ModelSettings, source: FileSource, clock: Clock) -> None:
        self._settings = settings
        self._source = source
        self._cache = FileCache(settings.files_dir, clock, sets_max=settings.file_sets_max)

    async def find(self, card: ModelCard, workers: Sequence[Instance]) -> Path:
        """Returns the directory with the files that `card` names. Fetches them from one of `workers`, which have the same digest.

        Raises MeshError that says what is missing here and what the workers answered.
        """
        if not card.files_digest:
            return await asyncio.to_thread(
                model_directory, card.source, revision=card.revision, cache_dir=self._settings.cache_dir
            )
        local, why_not_local = await asyncio.to_thread(self._find_local, card)
        found = local or await asyncio.to_thread(self._cache.find, card.files_digest)
        return found or await self._fetch(card, workers, why_not_local)

    def _find_local(self, card: ModelCard) -> tuple[Path | None, str]:
        """Returns the directory that the workers name, if it has the same files here; else why not."""
        try:
            directory = find_directory(card.source, revision=card.revision, cache_dir=self._settings.cache_dir)
            digest = digest_of_files(list_files(directory))
        except (UnsupportedError, OSError) as error:
            return None, str(error)
        if digest == card.files_digest:
            return directory, ""
        return None, f"{directory} has other files here (digest {digest[:12] or 'of no files'})"

    async def _fetch(self, card: ModelCard, workers: Sequence[Instance], why_not_local: str) -> Path:
        answers: list[str] = []
        for worker in workers[:_WORKERS_TRIED_MAX]:
            try:
                contents = await self._source.fetch_model_files(
                    worker.address, digest=card.files_digest, timeout_s=self._settings.fetch_timeout_s
                )
            except MeshError as error:
                answers.append(f"worker {worker.instance_id} at {worker.address}: {error.message}")
                continue
            folder = await asyncio.to_thread(self._cache.add, card.files_digest, contents)
            _log.info(
                "model_files_fetched",
                model=card.name,
                worker_id=worker.instance_id,
                files=len(contents),
                bytes=sum(map(len, contents.values())),
                folder=str(folder),
                detail=why_not_local,
            )
            return folder
        raise UnavailableError(
            f"the files of digest {card.files_digest[:12]} of {card.name} cannot be loaded: {why_not_local}; {'; '.join(answers)}",
            reason="model_files_unavailable",
        )
