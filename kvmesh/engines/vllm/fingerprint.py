"""The KV compatibility hash: covers everything that must be equal for two engines to exchange KV, including the model's files."""

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvmesh.engines.vllm.file_hashes import FileHashes

log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIGURATIONS = ("config.json", "params.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")
BLOB_NAME = re.compile("[0-9a-f]{64}")
MAIN = "main"


def model_fingerprint(
    model: str, revision: str, hashes: FileHashes, *, cache_folder: str | None = None, needs_weights: bool = True
) -> str:
    """Names a model by the content of its files, wherever they lie. Reads all of them, unless their hashes are known.

    A hub name stands for its snapshot in the hub's local cache; nothing is fetched. Where no weights are found, as with models
    that are streamed from an object store, name and revision are the identity. Without a revision the fingerprint is unique:
    such an engine pairs with no other, since nothing says that both have the same weights.
    """
    files = model_files(model, revision, cache_folder)
    if any(path.suffix in WEIGHT_SUFFIXES for path in files) or (files and not needs_weights):
        return files_fingerprint(files, hashes)
    if revision:
        return hashlib.sha256(f"{model}\0{revision}".encode()).hexdigest()
    log.warning("model_not_identified", extra={"data": {"model": model, "remedy": "set a revision to allow handoffs"}})
    return uuid.uuid4().hex


def model_files(model: str, revision: str, cache_folder: str | None = None) -> list[Path]:
    """Files that decide what KV a model computes: configuration, code and weights, of multimodal models those of the processor.

    Tokenizers count for the latter only, which expand their media with it; the mesh's prompts are token ids already.
    """
    if Path(model).is_file():
        return [Path(model)]
    folder = Path(model) if Path(model).is_dir() else snapshot_folder(model, revision, cache_folder)
    if folder is None:
        return []
    found = [path for path in folder.iterdir() if path.is_file()]
    names = {*CONFIGURATIONS, *PROCESSORS}
    if any(path.name in PROCESSORS for path in found):
        names.update(TOKENIZERS)
    return [path for path in found if path.name in names or path.suffix in (*WEIGHT_SUFFIXES, ".py")]


def snapshot_folder(model: str, revision: str, cache_folder: str | None = None) -> Path | None:
    """Where the hub's local cache has the commit that a hub name and revision stand for; None where it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in CONFIGURATIONS:
        try:
            path = try_to_load_from_cache(model, name, revision=revision or MAIN, cache_dir=cache_folder)
        except ValueError:  # Not a name of the hub.
            return None
        if isinstance(path, str):
            return Path(path).parent
    return None


def adapter_fingerprint(source: str, hashes: FileHashes) -> str:
    """Names a LoRA adapter by the content of its configuration and weights."""
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
    """The SHA-256 of a file in the hub's cache, which names large files by it; empty for others."""
    target = path.resolve()
    is_blob = path.is_symlink() and target.parent.name == "blobs" and BLOB_NAME.fullmatch(target.name)
    return f"sha256:{target.name}" if is_blob else ""


def compatibility_hash(factors: Mapping[str, object]) -> str:
    """Hash of named factors, independent of their order."""
    text = json.dumps({name: str(value) for name, value in factors.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
