"""What the load generator sends to: one protocol, OpenAI HTTP and native gRPC behind it."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request to send; ends after exactly `output_tokens`."""

    prompt: str
    output_tokens: int


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What came of it. Times in seconds; TTFT and end-to-end count from the intended send time in an open loop."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    error: str = ""
    gaps_s: list[float] = field(default_factory=list)


class Target(Protocol):
    """One way to reach a server."""

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        """One request to its end; failures come as `error`, not as exceptions."""
        ...

    async def aclose(self) -> None:
        """Ends connections."""
        ...
