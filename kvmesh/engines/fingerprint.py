"""Fingerprints of models and adapters for the KV compatibility hash."""

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvmesh.engines.file_hashes import FileHashes
from kvmesh.event_log import event_logger

_log = event_logger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGURATIONS = ("config.json", "params.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")
BLOB_NAME = re.compile("[0-9a-f]{64}")
MAIN = "main"


def model_fingerprint(
    model: str, revision: str, hashes: FileHashes, *, cache_folder: str | None = None, needs_weights: bool = True
) -> str:
    """Identifies a model by the content of its files. Reads all files whose hashes are not cached.

    For a hub name the files are those of its snapshot in the hub's local cache; nothing is downloaded. If there are no weights, as with
    models that are streamed from an object store, name and revision identify the model. Without a revision the fingerprint is unique, so
    the engine exchanges KV with no other engine, because nothing proves that both have the same weights.
    """
    files = model_files(model, revision=revision, cache_folder=cache_folder)
    if any(path.suffix in WEIGHT_SUFFIXES for path in files) or (files and not needs_weights):
        return files_fingerprint(files, hashes)
    if revision:
        return hashlib.sha256(f"{model}\0{revision}".encode()).hexdigest()
    _log.warning("model_not_identified", model=model, advice="set a revision to allow handoffs")
    return uuid.uuid4().hex


def model_files(model: str, revision: str, cache_folder: str | None = None) -> list[Path]:
    """Files that determine a model's KV: configuration, code and weights, and for multimodal models the processor's files.

    Tokenizers matter for multimodal models only, which use them to expand media. Other prompts arrive as token ids.
    """
    if Path(model).is_file():
        return [Path(model)]
    folder = (
        Path(model) if Path(model).is_dir() else snapshot_folder(model, revision=revision, cache_folder=cache_folder)
    )
    if folder is None:
        return []
    found = [path for path in folder.iterdir() if path.is_file()]
    names = {*CONFIGURATIONS, *PROCESSORS}
    if any(path.name in PROCESSORS for path in found):
        names.update(TOKENIZERS)
    return [path for path in found if path.name in names or path.suffix in (*WEIGHT_SUFFIXES, ".py")]


def snapshot_folder(model: str, revision: str, cache_folder: str | None = None) -> Path | None:
    """Returns the folder of a hub name and revision in the hub's local cache; None if it is not cached."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in CONFIGURATIONS:
        try:
            path = try_to_load_from_cache(model, name, revision=revision or MAIN, cache_dir=cache_folder)
        except ValueError:  # Not a hub name.
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None


def adapter_fingerprint(source: str, hashes: FileHashes) -> str:
    """Identifies a LoRA adapter by the content of its configuration and weights."""
    return files_fingerprint(
        (path for path in Path(source).iterdir() if path.suffix in (".json", *WEIGHT_SUFFIXES) and path.is_file()),
        hashes,
    )


def files_fingerprint(files: Iterable[Path], hashes: FileHashes) -> str:
    ordered = sorted(files)
    unknown = [path for path in ordered if not hub_hash(path)]
    contents = hashes.get(unknown)
    digest = hashlib.sha256()
    for path in ordered:
        digest.update(f"{path.name}\0{hub_hash(path) or contents[path]}\0".encode())
    return digest.hexdigest()


def hub_hash(path: Path) -> str:
    """Returns the SHA-256 of a large file in the hub's cache, which is the file's name there; empty for other files."""
    target = path.resolve()
    is_blob = path.is_symlink() and target.parent.name == "blobs" and BLOB_NAME.fullmatch(target.name)
    return f"sha256:{target.name}" if is_blob else ""


def compatibility_hash(factors: Mapping[str, object]) -> str:
    """Hash of named factors, independent of their order."""
    text = json.dumps({name: str(value) for name, value in factors.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
