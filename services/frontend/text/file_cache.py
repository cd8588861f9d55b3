"""Files of models that workers sent, in a private directory of the user: one folder per digest, which several processes share."""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvmesh.clock import Clock
from kvmesh.errors import UnavailableError, UnsupportedError
from kvmesh.model_files import digest_of_files, list_files

_DIGEST = re.compile("[0-9a-f]{64}")
_ABANDONED_S = 3600.0
"""Age of a folder that its process never finished."""


class FileCache:
    """Keeps the most recently used sets of files. All methods block.

    1. A folder named by a digest is complete: it is renamed into place after its last file was written.
    2. A set of files with another digest than its folder's name is never returned.
    """

    def __init__(self, directory: str, clock: Clock, *, sets_max: int) -> None:
        self._root = _root(directory)
        self._clock = clock
        self._sets_max = sets_max

    def find(self, digest: str) -> Path | None:
        """Returns the folder with files of the digest. A damaged one is removed."""
        folder = self._folder(digest)
        try:
            if digest_of_files(list_files(folder)) == digest:
                os.utime(folder)
                return folder
        except (OSError, UnsupportedError):
            pass
        _remove(folder)
        return None

    def add(self, digest: str, contents: Mapping[str, bytes]) -> Path:
        """Writes a set of files, whose names and digest the caller has checked. Raises UnavailableError if the disk refuses."""
        folder = self._folder(digest)
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
            try:
                for name, content in contents.items():
                    (new / name).parent.mkdir(exist_ok=True)
                    (new / name).write_bytes(content)
                # Fails if another process has just added the same set, which is equivalent.
                with suppress(OSError):
                    new.rename(folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            self._remove_surplus()
        except OSError as error:
            raise self._unusable(str(error)) from error
        if self.find(digest) is None:
            raise self._unusable("they cannot be read back")
        return folder

    def _folder(self, digest: str) -> Path:
        # The digest comes from a worker, and folders are removed.
        if not _DIGEST.fullmatch(digest):
            raise UnsupportedError(f"{digest[:100]!r} is not a SHA-256 digest", reason="bad_card")
        return self._root / digest

    def _remove_surplus(self) -> None:
        folders: list[tuple[float, Path]] = []
        for folder in self._root.iterdir():
            with suppress(FileNotFoundError):  # Another process has just renamed it.
                folders.append((folder.stat().st_mtime, folder))
        complete = sorted(entry for entry in folders if not entry[1].name.startswith("."))
        limit_s = self._clock.wall() - _ABANDONED_S
        abandoned = [entry for entry in folders if entry[1].name.startswith(".") and entry[0] < limit_s]
        for _, folder in [*complete[: max(0, len(complete) - self._sets_max)], *abandoned]:
            _remove(folder)

    def _unusable(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"the files cannot be stored in {self._root}: {why}; set models.files_dir to a directory that this process may write",
            reason="model_files_not_stored",
        )


def _root(given: str) -> Path:
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "kvmesh" / "model-files"


def _remove(folder: Path) -> None:
    """Removes a folder in two steps, so that no process sees a part of it under its digest."""
    with suppress(OSError):
        hidden = folder.with_name(f".old-{os.getpid()}-{folder.name}")
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
