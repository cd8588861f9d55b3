"""Serves the tokenizer, the templates and the configuration of the worker's model to frontends that lack them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core import ModelCard
from kvmesh.errors import NotFoundError, OverloadedError, UnsupportedError
from kvmesh.event_log import event_logger
from kvmesh.model_files import ModelFile, digest_of_files, find_directory, list_files

_log = event_logger(__name__)
STREAMS_MAX = 8
"""Files that are sent at a time. Each stream holds one open file and one part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A part of a file. `name` is its path in the model's directory."""

    name: str
    data: bytes
    is_last: bool


class ServedFiles:
    """A part of the process. `start` follows the engine's, which may have to download the model.

    Only the files that `start` lists are served. Files that change afterwards fail the frontend's check of the digest.
    """

    def __init__(self, card: Callable[[], ModelCard]) -> None:
        self._card = card
        self._files: Sequence[ModelFile] = ()
        self._streams = 0
        self.digest = ""
        """ModelCard.files_digest; empty: nothing is served."""

    async def start(self) -> None:
        """Lists and reads the files. Frontends need their own copy of files that cannot be served."""
        card = self._card()
        try:
            self._files, self.digest = await asyncio.to_thread(_identify, card)
        except (UnsupportedError, OSError) as error:
            _log.warning("model_files_not_served", model=card.name, source=card.source, detail=str(error))

    async def aclose(self) -> None:
        """Nothing to do."""

    async def parts(self, digest: str) -> AsyncIterator[FilePart]:
        """The files in order of their names. NotFoundError for another digest, OverloadedError beyond STREAMS_MAX."""
        if not self.digest or digest != self.digest:
            raise NotFoundError(
                f"this worker serves {f'files of digest {self.digest}' if self.digest else 'no files'}",
                reason="files_not_found",
                field="digest",
            )
        if self._streams >= STREAMS_MAX:
            raise OverloadedError("too many frontends fetch files", reason="file_streams_full", retry_after_s=1.0)
        self._streams += 1
        try:
            for file in self._files:
                parts = file.parts()
                part = await asyncio.to_thread(_next, parts)
                while part is not None:
                    following = await asyncio.to_thread(_next, parts)
                    yield FilePart(name=file.name, data=part, is_last=following is None)
                    part = following
        finally:
            self._streams -= 1


def _next(parts: Iterator[bytes]) -> bytes | None:
    return next(parts, None)


def _identify(card: ModelCard) -> tuple[Sequence[ModelFile], str]:
    directory: Path = find_directory(card.source, revision=card.revision, cache_dir="")
    files = list_files(directory)
    return files, digest_of_files(files)
