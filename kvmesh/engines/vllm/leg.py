"""One leg inside the vLLM engine, and the translation of vLLM's step outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.core import FinishReason, LegTask, TokenLogprob, Usage
from kvmesh.engines.base import EngineRequest
from kvmesh.kv.paths import Pull

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


@dataclass(slots=True, eq=False, kw_only=True)
class VllmLeg:
    """A leg's state. `inner_id` is its request id in vLLM, new for each attempt.

    `parameters` are the connector's for the present attempt; None: the prompt is computed here without a handoff.
    `pull` is set from the leg's start until its pull's end is reported to the paths; `pull_polls` counts the steps that saw it in
    progress, and `pulled_at_s` is when it was seen to have ended. `pull_ends_s` is the end of its time limit.
    """

    request: EngineRequest
    inner_id: str
    core_request: Any
    prompt_tokens: int
    prompt: str
    parameters: Mapping[str, Any] | None = None
    adapter_number: int = 0
    pull_by_s: float = 0.0
    pull_ends_s: float | None = None
    pull: Pull | None = None
    pull_polls: int = 0
    pulled_at_s: float | None = None
    was_recomputed: bool = False
    submitted_at_s: float = 0.0
    queue_s: float = 0.0
    attempt: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def is_prefill(self) -> bool:
        return self.request.task is LegTask.PREFILL

    @property
    def emitted_token_ids(self) -> Sequence[int]:
        """Tokens at the end of vLLM's prompt that are output to its sampler. A prefill leg's token is discarded, so there are none."""
        return self.request.generation.emitted_token_ids if self.request.task is LegTask.GENERATE else ()

    @property
    def pulls(self) -> bool:
        """True if the present attempt pulls a handle."""
        return self.parameters is not None and not self.is_prefill

    @property
    def computes_prompt(self) -> bool:
        """True for legs whose waiting time counts as queueing: those without a handle."""
        return self.request.handle is None and self.request.task is not LegTask.EMBED

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.generation.token_ids),
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
        )


def stop_token(output: Any, reason: FinishReason) -> int | None:
    """Returns the token that ended an answer. vLLM reports stop tokens, but not the model's main end token."""
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
