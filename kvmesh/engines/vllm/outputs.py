"""Translates vLLM's step outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core import FinishReason, TokenLogprob
from kvmesh.engines.base import EngineFinish, StepOutput

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


@dataclass(slots=True)
class StepBuilder:
    """Collects the entries of one StepOutput."""

    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    finishes: list[EngineFinish] = field(default_factory=list)

    def add(self, key: int, token_ids: Sequence[int]) -> None:
        self.keys.append(key)
        self.token_ids.extend(token_ids)
        self.counts.append(len(token_ids))

    @property
    def has_output(self) -> bool:
        return bool(self.keys or self.finishes or self.prompt_logprobs)

    def take(self, step: int) -> StepOutput | None:
        """The output; None when there are no entries."""
        if not self.has_output:
            return None
        is_plain = len(self.token_ids) == len(self.keys) and all(count == 1 for count in self.counts)
        return StepOutput(
            step=step,
            keys=self.keys,
            token_ids=self.token_ids,
            counts=None if is_plain else self.counts,
            logprobs=self.logprobs,
            finishes=self.finishes,
            prompt_logprobs=self.prompt_logprobs,
        )


def stop_token(output: Any, reason: FinishReason) -> int | None:
    """The token that ended an answer. vLLM reports stop tokens, but not the model's main end token."""
    if reason is not FinishReason.STOP:
        return None
    if isinstance(output.stop_reason, int):
        return output.stop_reason
    return int(output.new_token_ids[-1]) if output.new_token_ids else None


def token_logprobs(lists: Any, alternatives: int) -> list[TokenLogprob]:
    """From vLLM's arrays: row i is token i, column 0 the chosen token, then the best alternatives."""
    return [
        TokenLogprob(logprob=values[0], alternatives=list(zip(ids[1 : alternatives + 1], values[1:], strict=False)))
        for ids, values in zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    ]
