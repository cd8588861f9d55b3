"""The files of a model that a frontend needs: where they are, which they are, what identifies them. Data only, never weights or code."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvmesh.errors import UnavailableError, UnsupportedError

TEMPLATE_DIRECTORY = "additional_chat_templates"
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*.json",
    "*.jinja",
)
"""Patterns of file names. Each ends with the suffix of a data format: no pattern matches code."""
HUB_PATTERNS = (*NAMES, f"{TEMPLATE_DIRECTORY}/*.jinja")
"""The same files as patterns of the hub's client."""
FILES_MAX = 64
FILES_BYTES_MAX = 128 << 20
"""Of all files of a model together. The largest tokenizers have some 40 MB."""
PART_BYTES_MAX = 1 << 20
_BASE_NAME = re.compile(r"\w[\w.+-]{0,199}", re.ASCII)


def is_model_file(name: str) -> bool:
    """Returns True for the relative paths that a worker may serve and a frontend may write. Never absolute, never with `..`."""
    base = name.removeprefix(f"{TEMPLATE_DIRECTORY}/")
    patterns = NAMES if base == name else ("*.jinja",)
    return _BASE_NAME.fullmatch(base) is not None and any(fnmatchcase(base, pattern) for pattern in patterns)


def find_directory(source: str, *, revision: str, cache_dir: str) -> Path:
    """Returns `source` if it is a directory, else its snapshot in the Hugging Face cache. Downloads nothing."""
    directory = Path(source).expanduser()
    if directory.is_dir():
        return directory
    cache = Path(cache_dir).expanduser() if cache_dir else _default_cache()
    model = cache / f"models--{source.replace('/', '--')}"
    for name in (revision, "main"):
        reference = model / "refs" / name if name else model / "refs" / "main"
        commit = reference.read_text().strip() if reference.is_file() else name
        if commit and (snapshot := model / "snapshots" / commit).is_dir():
            return snapshot
    raise UnsupportedError(
        f"{source} is neither a directory here nor in the Hugging Face cache {cache}", reason="model_files_missing"
    )


def _default_cache() -> Path:
    """Follows Hugging Face's rule: HF_HUB_CACHE, HF_HOME/hub, ~/.cache/huggingface/hub."""
    if found := os.environ.get("HF_HUB_CACHE"):
        return Path(found)
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file in a model's directory. `path` has no symbolic links."""

    name: str
    path: Path

    def parts(self) -> Iterator[bytes]:
        """The content in parts of at most PART_BYTES_MAX; the last part, and only that one, is shorter. Blocks."""
        with self.path.open("rb") as stream:
            while len(part := stream.read(PART_BYTES_MAX)) == PART_BYTES_MAX:
                yield part
            yield part


def list_files(directory: Path) -> Sequence[ModelFile]:
    """Returns the model's files in a directory, sorted by name. Raises UnsupportedError beyond the limits, and for a link that leads elsewhere.

    Links may lead to files in the directory, and from a snapshot of the Hugging Face cache to the blobs of its repository.
    """
    root = directory.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    found: list[ModelFile] = []
    bytes_total = 0
    for entry in sorted([*root.iterdir(), *(root / TEMPLATE_DIRECTORY).glob("*.jinja")]):
        name = entry.relative_to(root).as_posix()
        path = entry.resolve()
        if not is_model_file(name) or not path.is_file():
            continue
        if not any(path.is_relative_to(folder) for folder in allowed):
            raise UnsupportedError(
                f"{entry} is a link to a file outside of the model's directory", reason="model_file_outside"
            )
        found.append(ModelFile(name=name, path=path))
        bytes_total += path.stat().st_size
    if len(found) > FILES_MAX or bytes_total > FILES_BYTES_MAX:
        raise UnsupportedError(
            f"{directory} has {len(found)} tokenizer, template and configuration files of {bytes_total} bytes; "
            f"the limits are {FILES_MAX} and {FILES_BYTES_MAX}",
            reason="model_files_too_large",
        )
    return sorted(found, key=lambda file: file.name)


def digest_of_files(files: Sequence[ModelFile]) -> str:
    """ModelCard.files_digest of files on disk, which it reads; empty if there are none."""
    hashes: dict[str, bytes] = {}
    for file in files:
        content = hashlib.sha256()
        for part in file.parts():
            content.update(part)
        hashes[file.name] = content.digest()
    return _digest(hashes)


def digest_of_contents(contents: Mapping[str, bytes]) -> str:
    """ModelCard.files_digest of files in memory, by name; empty if there are none."""
    return _digest({name: hashlib.sha256(content).digest() for name, content in contents.items()})


def _digest(hashes: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(name.encode() + b"\0" + hashes[name])
    return digest.hexdigest() if hashes else ""


class FileAssembler:
    """Assembles the files that a worker sends. Nothing is usable before `contents` has checked all of it.

    A worker that breaks a rule is refused with UnavailableError: another one may serve the same files.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._contents: dict[str, bytearray] = {}
        self._open = ""
        """The file whose last part has not arrived."""
        self._bytes = 0

    def add(self, name: str, data: bytes, *, is_last: bool) -> None:
        """Adds the next part of a file."""
        if not is_model_file(name):
            raise _refusal(f"sent the file {name[:255]!r}, which is no tokenizer, template or configuration")
        if self._open not in ("", name) or (not self._open and name in self._contents):
            raise _refusal(f"sent parts of {name} out of order")
        self._bytes += len(data)
        content = self._contents.setdefault(name, bytearray())
        if len(data) > PART_BYTES_MAX or self._bytes > FILES_BYTES_MAX or len(self._contents) > FILES_MAX:
            raise _refusal(f"exceeded a limit ({FILES_MAX} files, {FILES_BYTES_MAX} bytes, {PART_BYTES_MAX} per part)")
        content += data
        self._open = "" if is_last else name

    def contents(self) -> Mapping[str, bytes]:
        """Returns all files by name. Raises UnavailableError unless they have the digest."""
        contents = {name: bytes(content) for name, content in self._contents.items()}
        if self._open or digest_of_contents(contents) != self._digest:
            raise _refusal("sent files with another digest; they may have changed since it started: restart it")
        return contents


def _refusal(what: str) -> UnavailableError:
    return UnavailableError(f"the worker {what}", reason="model_files_invalid")
