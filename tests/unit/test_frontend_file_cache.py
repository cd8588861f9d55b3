"""The frontend's on-disk cache of model files."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import UnavailableError, UnsupportedError
from kvmesh.model_files import digest_of_contents
from services.frontend.text.file_cache import FileCache

FILES = {"config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
DIGEST = digest_of_contents(FILES)


def make_cache(root: Path, sets_max: int = 16) -> FileCache:
    return FileCache(str(root), SystemClock(), sets_max=sets_max)


def test_files_are_private_and_persistent(tmp_path: Path) -> None:
    """A new cache object, as in another process, finds the files."""
    root = tmp_path / "a" / "b"
    assert make_cache(root).find(DIGEST) is None
    folder = make_cache(root).add(DIGEST, FILES)
    assert make_cache(root).find(DIGEST) == folder == root / DIGEST
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert stat.S_IMODE(root.stat().st_mode) == stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_concurrent_processes_add_the_same_set(tmp_path: Path) -> None:
    """Threads that add the same set concurrently all get the complete set, and no temporary directory remains."""
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: make_cache(tmp_path).add(DIGEST, FILES), range(32)))
    assert set(folders) == {tmp_path / DIGEST}
    assert [path.name for path in tmp_path.iterdir()] == [DIGEST]


def test_a_damaged_set_is_not_used(tmp_path: Path) -> None:
    """A set whose contents do not match its digest is removed, and can be added again."""
    cache = make_cache(tmp_path)
    (cache.add(DIGEST, FILES) / "config.json").write_bytes(b"[]")
    assert cache.find(DIGEST) is None
    assert list(tmp_path.iterdir()) == []
    assert cache.add(DIGEST, FILES) == cache.find(DIGEST)


def test_the_number_of_sets_is_limited(tmp_path: Path) -> None:
    """Beyond the limit, the least recently used sets are removed. Temporary directories of killed processes are removed after an hour."""
    cache = make_cache(tmp_path, sets_max=2)
    sets = [{"config.json": str(i).encode()} for i in range(3)]
    digests = [digest_of_contents(files) for files in sets]
    (tmp_path / ".new-old").mkdir()
    os.utime(tmp_path / ".new-old", (1, 1))
    (tmp_path / ".new-young").mkdir()
    for age_s, digest, files in zip((100, 200), digests, sets, strict=False):
        cache.add(digest, files)
        os.utime(tmp_path / digest, (age_s, age_s))
    assert cache.find(digests[0]) is not None
    cache.add(digests[2], sets[2])
    assert {path.name for path in tmp_path.iterdir()} == {digests[0], digests[2], ".new-young"}


@pytest.mark.parametrize("digest", ["", "..", "../other", "/etc", "A" * 64, DIGEST + "/..", DIGEST + "\n"])
def test_a_digest_that_is_a_path_is_refused(tmp_path: Path, digest: str) -> None:
    """A worker's digest must never remove or create another directory."""
    other = tmp_path / "other"
    other.mkdir()
    cache = make_cache(tmp_path / "cache")
    for use in (lambda: cache.find(digest), lambda: cache.add(digest, FILES)):
        with pytest.raises(UnsupportedError, match="digest"):
            use()
    assert list(tmp_path.iterdir()) == [other]


def test_a_directory_that_is_not_writable(tmp_path: Path) -> None:
    """A cache directory that cannot be written to is reported with its path and its setting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"models\.files_dir") as caught:
        make_cache(tmp_path / "file").add(DIGEST, FILES)
    assert str(tmp_path / "file") in caught.value.message
