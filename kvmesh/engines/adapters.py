"""LoRA adapters that an engine has loaded. Requests may name loaded ones only: a wrong path in a request kills some engines."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import adapter_fingerprint
from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError, UnsupportedError

CONTENT_MARK = "\0"
"""Separates an adapter's name from the hash of its content. Names never contain it."""
T = TypeVar("T")


def name_of(identity: str) -> str:
    """Returns the name in the mesh from an adapter's identity."""
    return identity.partition(CONTENT_MARK)[0]


@dataclass(slots=True, kw_only=True)
class EngineAdapters(Generic[T]):
    """Loaded adapters by name, each with its identity and what the engine knows it by.

    An identity is the name and a hash of the content. Engines put it into the keys of cached blocks, so that an adapter of the same name
    with other weights never uses these blocks.
    """

    adapters_max: int
    is_enabled: bool
    hashes: FileHashes = field(default_factory=FileHashes)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    """New numbers for engines that number adapters: cached blocks of an unloaded one must not be used again."""
    _loaded: dict[str, tuple[str, T]] = field(default_factory=dict)

    def get(self, name: str) -> T | None:
        """Returns None for an empty name. NotFoundError for an unknown one."""
        if not name:
            return None
        if name not in self._loaded:
            raise NotFoundError(f"adapter {name} is not loaded", field="generation.adapter", reason="adapter_not_found")
        return self._loaded[name][1]

    def identity_of(self, name: str) -> str:
        """Empty for a name that is not loaded."""
        return self._loaded[name][0] if name in self._loaded else ""

    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def identity(self, name: str, source: str) -> str:
        """Reads the adapter's files: call it on a thread. NotFoundError if the directory `source` holds none; errors of `is_loaded`."""
        self._check_room(name)
        if not (Path(source) / "adapter_config.json").is_file():
            raise NotFoundError(f"{source} has no adapter_config.json", field="source", reason="adapter_not_found")
        return f"{name}{CONTENT_MARK}{adapter_fingerprint(source, self.hashes)}"

    def is_loaded(self, identity: str) -> bool:
        """InvalidRequestError if other content is loaded under the name, OverloadedError if no other adapter fits."""
        name = name_of(identity)
        self._check_room(name)
        if name not in self._loaded:
            return False
        if self._loaded[name][0] != identity:
            raise InvalidRequestError(f"adapter {name} is loaded with other content: unload it first", field="source")
        return True

    def _check_room(self, name: str) -> None:
        if not self.is_enabled:
            raise UnsupportedError("the engine was started without enable_lora", field="adapter")
        if name not in self._loaded and len(self._loaded) >= self.adapters_max:
            raise OverloadedError(f"{self.adapters_max} adapters are already loaded", reason="adapters_full")

    def add(self, identity: str, known_as: T) -> None:
        """Records an adapter that the engine has loaded."""
        self._loaded[name_of(identity)] = (identity, known_as)

    def remove(self, name: str) -> T | None:
        """Removes an adapter. Returns what the engine knows it by."""
        return self._loaded.pop(name, ("", None))[1]
