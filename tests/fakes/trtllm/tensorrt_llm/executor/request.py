"""See the package."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class LoRARequest:
    """See the stub."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
