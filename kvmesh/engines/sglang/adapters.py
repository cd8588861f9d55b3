"""LoRA adapters of one SGLang engine."""

from dataclasses import dataclass, field

from kvmesh.engines.adapter_check import check_adapter
from kvmesh.engines.file_hashes import FileHashes
from kvmesh.engines.fingerprint import adapter_fingerprint
from kvmesh.errors import InvalidRequestError, NotFoundError, UnsupportedError


@dataclass(slots=True, kw_only=True)
class SglangAdapters:
    """Loaded adapters: the ids by which SGLang knows them, by name. An id contains a hash of the adapter's content.

    SGLang puts the id into the keys of cached blocks, so an adapter of the same name with other weights never uses these blocks.
    """

    adapters_max: int
    is_enabled: bool
    hashes: FileHashes = field(default_factory=FileHashes)
    _ids: dict[str, str] = field(default_factory=dict)

    def id_of(self, name: str) -> str:
        """Empty for an empty name. NotFoundError for an unknown one."""
        if not name:
            return ""
        if not self.is_enabled:
            raise UnsupportedError("the engine was started without --sglang-enable-lora", field="generation.adapter")
        if name not in self._ids:
            raise NotFoundError(f"adapter {name} is not loaded", field="generation.adapter", reason="adapter_not_found")
        return self._ids[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._ids)

    def new_id(self, name: str, source: str) -> str:
        """The id for an adapter's files. Reads them: call it on a thread. Errors as `Engine.load_adapter`."""
        if not self.is_enabled:
            raise UnsupportedError("the engine was started without --sglang-enable-lora", field="adapter")
        check_adapter(name, source=source, loaded=self._ids, adapters_max=self.adapters_max)
        return f"{name}\0{adapter_fingerprint(source, self.hashes)}"

    def is_loaded(self, name: str, adapter_id: str) -> bool:
        """InvalidRequestError if other content is loaded under this name."""
        known = self._ids.get(name)
        if known is not None and known != adapter_id:
            raise InvalidRequestError(f"adapter {name} is loaded with other content: unload it first", field="source")
        return known is not None

    def add(self, name: str, adapter_id: str) -> None:
        self._ids[name] = adapter_id

    def remove(self, name: str) -> str:
        """The removed adapter's id; empty if there is none."""
        return self._ids.pop(name, "")
