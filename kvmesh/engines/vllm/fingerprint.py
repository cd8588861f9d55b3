"""Which engines may exchange KV: a hash over everything that must be equal."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

SAMPLE_BYTES = 1 << 16
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def model_fingerprint(model: str, revision: str) -> str:
    """Content of a model directory: its configuration, and of each weight file the size and samples of its bytes.

    A hub name is taken as such, with its revision. Reads three samples of 64 KiB per file, so that a model of any size
    takes milliseconds; two fine-tunes of one base differ in the samples.
    """
    folder = Path(model)
    digest = hashlib.sha256(f"{model if not folder.is_dir() else ''}\0{revision}\0".encode())
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.name == "config.json" or path.suffix in WEIGHT_SUFFIXES:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                _add_samples(digest, path)
    return digest.hexdigest()


def _add_samples(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2), max(0, size - SAMPLE_BYTES)}):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))


def compatibility_hash(factors: Mapping[str, object]) -> str:
    """Hash of named factors, independent of their order."""
    text = json.dumps({name: str(value) for name, value in factors.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
