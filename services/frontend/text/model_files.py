"""A model's files as the frontend needs them: from a directory, the hub's cache, or the hub, without the weights."""

import os
import re
from pathlib import Path

from kvmesh.errors import UnavailableError, UnsupportedError
from services.frontend.text.text_model import find_directory

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
"""Tokenizer, template and configuration: some megabytes, where the weights are gigabytes."""
OFFLINE = ("1", "on", "true", "yes")


def model_directory(source: str, revision: str, cache_dir: str) -> Path:
    """The directory of a model's text files. Blocks while a hub model's are fetched into the cache.

    UnsupportedError when the model is nowhere, UnavailableError when the hub cannot be reached.
    """
    try:
        return find_directory(source, revision, cache_dir)
    except UnsupportedError:
        if not HUB_NAME.fullmatch(source) or os.environ.get("HF_HUB_OFFLINE", "").lower() in OFFLINE:
            raise
    return _fetch(source, revision, cache_dir)


def _fetch(source: str, revision: str, cache_dir: str) -> Path:
    from huggingface_hub import snapshot_download  # Takes half a second, and few frontends need it.

    try:
        folder = snapshot_download(
            source, revision=revision or None, cache_dir=cache_dir or None, allow_patterns=list(TEXT_FILES)
        )
    except Exception as error:  # The client raises dozens of classes, of its own and of its HTTP library.
        text = " ".join(str(error).split())[:300]
        raise UnavailableError(
            f"the tokenizer of {source} cannot be fetched from the hub: {text}", reason="model_files_unreachable"
        ) from error
    return Path(folder)
