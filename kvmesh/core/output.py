"""The output of a generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"
    HANDED_OFF = "handed_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. Cached: found in a prefix cache. Transferred: KV that came from another worker."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of one token's probability, and the best alternatives as (token id, log-probability)."""

    logprob: float
    alternatives: Sequence[tuple[int, float]] = ()
