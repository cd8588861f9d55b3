"""LoRA adapters. Requests may name loaded adapters only, because a wrong path in a request kills the engine."""

from dataclasses import dataclass, field
from typing import Any

from kvmesh.engines.adapter_check import check_adapter
from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import adapter_fingerprint
from kvmesh.errors import InvalidRequestError, NotFoundError, UnsupportedError

CONTENT_MARK = "\0"
"""Separates an adapter's name from the hash of its content. Names never contain it."""


@dataclass(slots=True, kw_only=True)
class VllmAdapters:
    """Loaded adapters by name. Each gets a new id in vLLM (`lora_int_id`)."""

    adapters_max: int
    is_enabled: bool
    hashes: FileHashes = field(default_factory=FileHashes)
    _loaded: dict[str, Any] = field(default_factory=dict)
    _next: int = 1

    def get(self, name: str) -> Any:
        """vLLM's LoRARequest of a loaded adapter; None for an empty name. NotFoundError for an unknown name."""
        if not name:
            return None
        if name not in self._loaded:
            raise NotFoundError(f"adapter {name} is not loaded", field="generation.adapter", reason="adapter_not_found")
        return self._loaded[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def full_name(self, name: str, source: str) -> str:
        """The adapter's name in vLLM: its name in the mesh and a hash of its content. Reads the files: call it on a thread.

        vLLM puts this name into block hashes, so an adapter of the same name with other weights never uses these blocks. Raises the
        errors of `_check`.
        """
        self._check(name, source=source)
        return f"{name}{CONTENT_MARK}{adapter_fingerprint(source, self.hashes)}"

    def prepare(self, full_name: str, source: str) -> Any:
        """The LoRARequest that loads an adapter; None when it is loaded already. InvalidRequestError if other content is loaded."""
        name = mesh_name(full_name)
        self._check(name, source=source)
        known = self._loaded.get(name)
        if known is not None and known.lora_name == full_name:
            return None
        if known is not None:
            raise InvalidRequestError(f"adapter {name} is loaded with other content: unload it first", field="source")
        from vllm.lora.request import LoRARequest

        self._next += 1
        return LoRARequest(lora_name=full_name, lora_int_id=self._next - 1, lora_path=source)

    def _check(self, name: str, source: str) -> None:
        if not self.is_enabled:
            raise UnsupportedError("the engine was started without enable_lora", field="adapter")
        check_adapter(name, source=source, loaded=self._loaded, adapters_max=self.adapters_max)

    def add(self, request: Any) -> None:
        """Records an adapter that vLLM has loaded."""
        self._loaded[mesh_name(request.lora_name)] = request

    def remove(self, name: str) -> Any:
        """Removes an adapter. Returns its LoRARequest, or None."""
        return self._loaded.pop(name, None)


def mesh_name(full_name: str) -> str:
    """The name in the mesh from an adapter's full name."""
    return full_name.partition(CONTENT_MARK)[0]
