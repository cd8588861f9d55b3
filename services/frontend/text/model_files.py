"""Finds a model's tokenizer, template and configuration: in a directory, in the hub's cache, or on the hub. Never the weights."""

import os
import re
from pathlib import Path

from kvmesh.errors import UnavailableError, UnsupportedError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Some megabytes together; the weights have gigabytes."""
OFFLINE = ("1", "on", "true", "yes")


def model_directory(source: str, *, revision: str, cache_dir: str) -> Path:
    """Returns the directory of a model's text files. Blocks while it downloads those of a hub model into the cache.

    Raises UnsupportedError if the model does not exist, UnavailableError if the hub cannot be reached.
    """
    try:
        return find_directory(source, revision=revision, cache_dir=cache_dir)
    except UnsupportedError:
        if not HUB_NAME.fullmatch(source) or os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE:
            raise
    return _fetch(source, revision=revision, cache_dir=cache_dir)


def _fetch(source: str, *, revision: str, cache_dir: str) -> Path:
    from huggingface_hub import snapshot_download  # The import takes half a second, and few frontends need it.

    try:
        folder = snapshot_download(
            source, revision=revision or None, cache_dir=cache_dir or None, allow_patterns=list(TEXT_FILES)
        )
    except Exception as error:  # The client raises dozens of classes, its own and those of its HTTP library.
        text = " ".join(str(error).split())[:300]
        raise UnavailableError(
            f"the tokenizer of {source} cannot be fetched from the hub: {text}", reason="model_files_unreachable"
        ) from error
    return Path(folder)


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
        f"{source} is neither a directory here nor in the Hugging Face cache {cache}; the frontend needs its tokenizer",
        reason="model_files_missing",
    )


def _default_cache() -> Path:
    """By Hugging Face's rule: HF_HUB_CACHE, HF_HOME/hub, ~/.cache/huggingface/hub."""
    if found := os.environ.get("HF_HUB_CACHE"):
        return Path(found)
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
