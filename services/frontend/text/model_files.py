"""Finds a model's tokenizer, template and configuration where no worker serves them: in a directory, in the hub's cache, or on the hub."""

import os
import re
from pathlib import Path

from kvmesh.errors import UnavailableError, UnsupportedError
from kvmesh.model_files import HUB_PATTERNS, find_directory

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
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
    return _download(source, revision=revision, cache_dir=cache_dir)


def _download(source: str, *, revision: str, cache_dir: str) -> Path:
    from huggingface_hub import snapshot_download  # The import takes half a second, and few frontends need it.

    try:
        folder = snapshot_download(
            source, revision=revision or None, cache_dir=cache_dir or None, allow_patterns=list(HUB_PATTERNS)
        )
    except Exception as error:  # The client raises dozens of classes, its own and those of its HTTP library.
        text = " ".join(str(error).split())[:300]
        raise UnavailableError(
            f"the tokenizer of {source} cannot be fetched from the hub: {text}", reason="model_files_unreachable"
        ) from error
    return Path(folder)
