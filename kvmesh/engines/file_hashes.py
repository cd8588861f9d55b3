"""Hashes of whole files, computed in parallel and cached in the user's cache directory."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_128

from kvmesh.errors import InternalError
from kvmesh.event_log import event_logger

_log = event_logger(__name__)

ENTRIES_MAX = 4096
"""Cached entries, some 150 bytes each. The oldest are dropped first."""
THREADS_MAX = 8
"""With more threads the disk is the limit."""
CHUNK_BYTES = 1 << 22
QUIET_S = 10.0
"""Time between two log lines about a long run."""
SETTLED_S = 2.0
"""The hash of a file that changed more recently is not cached: the file could change again within the same time stamp."""

Stamp = list[int]


def cache_file() -> Path:
    """`kvmesh/file-hashes.json` in the user's cache directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvmesh" / "file-hashes.json"


@dataclass(slots=True)
class FileHashes:
    """XXH3 hashes of 128 bits: ten times as fast as SHA-256, without accidental collisions. A cryptographic hash would not protect more,
    since anyone who can write a model's files controls its answers anyway.

    A cached hash is valid while path, device, inode, size and both time stamps are unchanged. Without a usable cache file every file is
    read.
    """

    path: Path = field(default_factory=cache_file)
    wall: Callable[[], float] = time.time

    def get(self, files: Iterable[Path]) -> dict[Path, str]:
        """Returns the hash of each file. OSError when a file cannot be read, InternalError when one changes while it is read."""
        known, found = self._load(), {}
        stamps = {path: stamp_of(path) for path in files}
        missing = []
        for path, stamp in stamps.items():
            entry = known.get(str(path.resolve()))
            if entry is not None and entry[1:] == stamp:
                found[path] = str(entry[0])
            else:
                missing.append(path)
        if not missing:
            return found
        progress = HashProgress(sum(stamps[path][2] for path in missing))
        with ThreadPoolExecutor(min(THREADS_MAX, len(missing))) as threads:
            found.update(zip(missing, threads.map(lambda path: hash_file(path, progress), missing), strict=True))
        for path in missing:
            if stamp_of(path) != stamps[path]:
                raise InternalError(f"{path.name} changed while it was read", reason="model_changed")
        self._remember({path: (found[path], stamps[path]) for path in missing})
        return found

    def _load(self) -> dict[str, list[object]]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) and all(isinstance(entry, list) for entry in data.values()) else {}

    def _remember(self, hashed: Mapping[Path, tuple[str, Stamp]]) -> None:
        now_ns = int((self.wall() - SETTLED_S) * 1e9)
        entries = self._load()
        for path, (digest, stamp) in hashed.items():
            name = str(path.resolve())
            # Added again at the end: the order of the entries is their age.
            entries.pop(name, None)
            if max(stamp[3:]) < now_ns:
                entries[name] = [digest, *stamp]
        newest = dict(list(entries.items())[-ENTRIES_MAX:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # If two processes write at the same time, the last one wins, and the other's files are hashed again later.
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(newest, file)
            os.replace(file.name, self.path)
        except OSError as error:
            _log.warning("file_hashes_not_kept", path=str(self.path), detail=str(error))


def stamp_of(path: Path) -> Stamp:
    """Device, inode, size, and times of the last change of content and of metadata."""
    state = path.stat()
    return [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]


def hash_file(path: Path, progress: "HashProgress") -> str:
    """Returns the hash of the whole file. Releases the interpreter lock while it computes."""
    digest, buffer = xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            progress.add(size)
    return f"xxh3:{digest.hexdigest()}"


class HashProgress:
    """Logs the progress of a long run every QUIET_S. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._due_s = time.monotonic() + QUIET_S

    def add(self, size: int) -> None:
        with self._lock:
            self._done_bytes += size
            if time.monotonic() < self._due_s:
                return
            self._due_s = time.monotonic() + QUIET_S
            _log.info("weights_being_hashed", done_bytes=self._done_bytes, total_bytes=self._total_bytes)
