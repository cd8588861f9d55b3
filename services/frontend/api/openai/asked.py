"""A parsed HTTP request: what goes to the pipeline, and how the answer is to look."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.pipeline.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`requests`: one per prompt, all with the same number of choices.

    `has_usage_throughout`: every event has the usage so far. `is_prompt_only`: nothing is wanted but the echo.
    `names_tokens_by_id`: log-probabilities have `token_id:N` for a token's text.
    """

    requests: Sequence[Request]
    is_stream: bool
    includes_usage: bool = False
    has_usage_throughout: bool = False
    has_logprobs: bool = False
    returns_token_ids: bool = False
    parses_tools: bool = False
    includes_reasoning: bool = True
    echoes: bool = False
    has_prompt_logprobs: bool = False
    is_prompt_only: bool = False
    names_tokens_by_id: bool = False

    @property
    def model(self) -> str:
        """The model's name."""
        return self.requests[0].model

    @property
    def echoes_logprobs(self) -> bool:
        """True when the echoed prompt has log-probabilities as the answer has."""
        return self.echoes and self.has_logprobs

    @property
    def choices(self) -> int:
        """Choices over all prompts."""
        return len(self.requests) * self.requests[0].choices
