"""Checks of a LoRA adapter that all engines make before they load it."""

from collections.abc import Collection
from pathlib import Path

from kvmesh.errors import NotFoundError, OverloadedError


def check_adapter(name: str, source: str, *, loaded: Collection[str], adapters_max: int) -> None:
    """Raises OverloadedError if no other adapter fits, NotFoundError if the directory `source` holds none."""
    if name not in loaded and len(loaded) >= adapters_max:
        raise OverloadedError(f"{adapters_max} adapters are loaded already", reason="adapters_full")
    if not (Path(source) / "adapter_config.json").is_file():
        raise NotFoundError(f"{source} has no adapter_config.json", field="source", reason="adapter_not_found")
