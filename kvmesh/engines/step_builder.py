"""Builds a StepOutput from the entries of an engine step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core import TokenLogprob
from kvmesh.engines.base import EngineFinish, StepOutput


@dataclass(slots=True, kw_only=True)
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
