"""Translates vLLM's step outputs."""

from typing import Any

from kvmesh.core import FinishReason, TokenLogprob

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.CANCELLED,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.STOP,
}


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
