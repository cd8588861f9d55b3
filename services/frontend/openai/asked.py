"""A parsed HTTP request: what goes to the pipeline, and how the answer is to look."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`requests`: one per prompt, all with the same number of choices."""

    requests: Sequence[Request]
    is_stream: bool
    includes_usage: bool = False
    has_logprobs: bool = False
    returns_token_ids: bool = False
    parses_tools: bool = False
    echoes: bool = False

    @property
    def model(self) -> str:
        """The model's name."""
        return self.requests[0].model

    @property
    def choices(self) -> int:
        """Choices over all prompts."""
        return len(self.requests) * self.requests[0].choices
