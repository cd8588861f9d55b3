"""The interface between the load generator and a server, over OpenAI HTTP or gRPC."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request to send. Its answer has exactly `output_tokens`."""

    prompt: str
    output_tokens: int


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """Result of one request. Times are in seconds. In an open loop, TTFT and end-to-end time count from the intended send time."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    chunks: int = 0
    error: str = ""
    gaps_s: list[float] = field(default_factory=list)


class Target(Protocol):
    """A connection to a server."""

    async def send(self, request: LoadRequest, intended_at_s: float) -> LoadResult:
        """Sends one request and waits for its end. Failures are in `error`, not raised."""
        ...

    async def aclose(self) -> None: ...
