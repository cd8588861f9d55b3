"""LoRA adapters: only those that vLLM has loaded are ever named to it, since a bad path in a request kills the engine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.errors import InvalidRequestError, NotFoundError, OverloadedError, UnsupportedError


@dataclass(slots=True)
class Adapters:
    """Loaded adapters by name. `number` is vLLM's id, never used twice."""

    adapters_max: int
    is_enabled: bool
    _loaded: dict[str, Any] = field(default_factory=dict)
    _next: int = 1

    def get(self, name: str) -> Any:
        """vLLM's request for a loaded adapter; None for no name. NotFoundError for an unknown one."""
        if not name:
            return None
        if name not in self._loaded:
            raise NotFoundError(f"adapter {name} is not loaded", field="generation.adapter", reason="adapter_not_found")
        return self._loaded[name]

    def names(self) -> tuple[str, ...]:
        """All loaded ones."""
        return tuple(self._loaded)

    def prepare(self, name: str, source: str) -> Any:
        """A request to load; None when it is loaded already. Raises what makes it impossible."""
        if not self.is_enabled:
            raise UnsupportedError("the engine was started without enable_lora", field="adapter")
        known = self._loaded.get(name)
        if known is not None and known.lora_path == source:
            return None
        if known is not None:
            raise InvalidRequestError(f"adapter {name} is loaded from elsewhere: unload it first", field="source")
        if len(self._loaded) >= self.adapters_max:
            raise OverloadedError(f"{self.adapters_max} adapters are loaded already", reason="adapters_full")
        if not (Path(source) / "adapter_config.json").is_file():
            raise NotFoundError(f"{source} holds no adapter_config.json", field="source", reason="adapter_not_found")
        from vllm.lora.request import LoRARequest

        self._next += 1
        return LoRARequest(lora_name=name, lora_int_id=self._next - 1, lora_path=source)

    def add(self, request: Any) -> None:
        """Remembers one that vLLM has loaded."""
        self._loaded[request.lora_name] = request

    def remove(self, name: str) -> Any:
        """Forgets one; its request, or None."""
        return self._loaded.pop(name, None)
