"""One leg inside the TensorRT-LLM engine, and the translation of its results: token ids and log-probabilities are cumulative."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmesh.core import FinishReason, LegTask, TokenLogprob, Usage
from kvmesh.engines.base import EngineFinish, EngineRequest
from kvmesh.engines.trtllm.sampling import CONTEXT, GENERATION, Stopping
from kvmesh.errors import DeadlineError, MeshError

if TYPE_CHECKING:
    from tensorrt_llm.disaggregated_params import DisaggregatedParams
    from tensorrt_llm.executor.request import LoRARequest
    from tensorrt_llm.executor.result import CompletionOutput
    from tensorrt_llm.llmapi.llm import RequestOutput

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.CANCELLED,
}


@dataclass(slots=True, eq=False, kw_only=True)
class TrtllmLeg:
    """A leg's state. The engine numbers each attempt itself, so `result` maps the mesh's key to the attempt.

    `params` are those of the present attempt's handoff; None: the engine computes the prompt and generates.
    `deadline` cancels a generation phase that gets no KV; `reader` reads the engine's results.
    `entry_step` is the number of the last step before the one with the leg's newest tokens.
    """

    request: EngineRequest
    tokens: Sequence[int]
    seed: int
    prompt: str
    rules: Stopping
    params: "DisaggregatedParams | None" = None
    adapter: "LoRARequest | None" = None
    was_recomputed: bool = False
    is_cancelled: bool = False
    submitted_at_s: float = 0.0
    queue_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    entry_step: int = -1
    result: "RequestOutput | None" = None
    reader: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def phase(self) -> str:
        """The handoff's phase; empty: none."""
        return (self.params.request_type or "") if self.params is not None else ""

    @property
    def is_prefill(self) -> bool:
        return self.request.task is LegTask.PREFILL

    @property
    def reads_handle(self) -> bool:
        return self.phase == GENERATION

    @property
    def is_context(self) -> bool:
        return self.phase == CONTEXT

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.generation.token_ids),
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
        )


def new_tokens(leg: TrtllmLeg, output: "CompletionOutput") -> list[int]:
    """Returns the tokens that the leg has not emitted.

    Taken from the cumulative ids, not from `token_ids_diff`: releases differ in whether the diff of a generation phase begins with the
    first token of the handoff, but in all of them the cumulative ids do.
    """
    return output.token_ids[leg.output_tokens :]


def new_logprobs(leg: TrtllmLeg, output: "CompletionOutput", token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Returns one per new token. The engine may lack that of the handed-over first token, which then has no alternatives."""
    alternatives = leg.request.generation.sampling.logprobs or 0
    entries: list[Any] = list(output.logprobs or ())
    missing = len(output.token_ids) - len(entries)
    found = [*([None] * missing), *entries][leg.output_tokens : leg.output_tokens + len(token_ids)]
    return [
        token_logprob(entry, token_id, alternatives=alternatives)
        for entry, token_id in zip(found, token_ids, strict=True)
    ]


def prompt_logprobs(leg: TrtllmLeg, output: "CompletionOutput") -> list[TokenLogprob]:
    """Returns one per prompt token from the second on. The engine's list begins with the second token, and has one entry more at its end."""
    alternatives = leg.request.generation.sampling.prompt_logprobs or 0
    scored = leg.tokens[1:]
    entries: list[Any] = list(output.prompt_logprobs or ())[: len(scored)]
    return [
        token_logprob(entry, token_id, alternatives=alternatives)
        for entry, token_id in zip(entries, scored, strict=False)
    ]


def token_logprob(entry: Mapping[int, Any] | float | None, token_id: int, alternatives: int) -> TokenLogprob:
    """From an entry by token id. The chosen token may be among the alternatives."""
    if entry is None:
        return TokenLogprob(logprob=0.0)
    if not isinstance(entry, Mapping):
        return TokenLogprob(logprob=min(0.0, float(entry)))
    ranked = sorted(((each, value.logprob) for each, value in entry.items()), key=lambda pair: -pair[1])
    chosen = entry[token_id].logprob if token_id in entry else ranked[0][1]
    return TokenLogprob(logprob=min(0.0, chosen), alternatives=ranked[:alternatives])


def finish(
    leg: TrtllmLeg,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    error: MeshError | None = None,
    handle: Any = None,
) -> EngineFinish:
    return EngineFinish(
        key=leg.key,
        reason=reason,
        usage=leg.usage(),
        stop_token_id=stop_token_id,
        error=error,
        handle=handle,
        was_recomputed=leg.was_recomputed,
        queue_s=leg.queue_s,
    )


def engine_finish(leg: TrtllmLeg, output: "CompletionOutput", end_id: int | None) -> EngineFinish:
    """Returns the engine's own end of an answer. It names stop tokens, but not the end token."""
    if output.finish_reason == "timeout":
        return failed(leg, DeadlineError("TensorRT-LLM ended the request by its own time limit"))
    reason = (
        FinishReason.CANCELLED if leg.is_cancelled else REASONS.get(output.finish_reason or "", FinishReason.CANCELLED)
    )
    stop = output.stop_reason if isinstance(output.stop_reason, int) else end_id
    return finish(leg, reason, stop_token_id=stop if reason is FinishReason.STOP else None)


def failed(leg: TrtllmLeg, error: MeshError) -> EngineFinish:
    return finish(leg, FinishReason.ERROR, error=error)
