"""LoRA adapters. The engine loads an adapter with the first request that names it, and evicts adapters by itself."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.engines.adapter_check import check_adapter
from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import adapter_fingerprint
from kvmesh.errors import InvalidRequestError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from tensorrt_llm.executor.request import LoRARequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter. `identity` is its name and a hash of its content, so KV of other weights under the same name is never read."""

    name: str
    identity: str
    request: "LoRARequest"


@dataclass(slots=True, kw_only=True)
class TrtllmAdapters:
    """Loaded adapters by name. Each gets a new number, so cached blocks of an unloaded one are never used again."""

    adapters_max: int
    is_enabled: bool
    hashes: FileHashes = field(default_factory=FileHashes)
    _loaded: dict[str, LoadedAdapter] = field(default_factory=dict)
    _next: int = 1

    def get(self, name: str) -> LoadedAdapter | None:
        """None for an empty name. NotFoundError for an unknown one."""
        if not name:
            return None
        if name not in self._loaded:
            raise NotFoundError(f"adapter {name} is not loaded", field="generation.adapter", reason="adapter_not_found")
        return self._loaded[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def identity(self, name: str, source: str) -> str:
        """Reads the adapter's files: call it on a thread."""
        self._check(name, source=source)
        return f"{name}\0{adapter_fingerprint(source, self.hashes)}"

    def prepare(self, name: str, source: str, identity: str) -> LoadedAdapter | None:
        """An adapter to try; None when it is loaded already. InvalidRequestError if other content is loaded under its name."""
        from tensorrt_llm.executor.request import LoRARequest

        self._check(name, source=source)
        known = self._loaded.get(name)
        if known is not None and known.identity != identity:
            raise InvalidRequestError(f"adapter {name} is loaded with other content: unload it first", field="source")
        if known is not None:
            return None
        self._next += 1
        request = LoRARequest(lora_name=identity, lora_int_id=self._next - 1, lora_path=source)
        return LoadedAdapter(name=name, identity=identity, request=request)

    def add(self, adapter: LoadedAdapter) -> None:
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        self._loaded.pop(name, None)

    def _check(self, name: str, source: str) -> None:
        if not self.is_enabled:
            raise UnsupportedError("the engine was started without enable_lora", field="adapter")
        check_adapter(name, source=source, loaded=self._loaded, adapters_max=self.adapters_max)
