"""One leg of an SGLang engine, and the translation of its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from kvmesh.core import FinishReason, KvCleared, KvEvent, KvRemoved, KvStored, KvTier, LegTask, TokenLogprob, Usage
from kvmesh.engines.base import EngineFinish, EngineRequest
from kvmesh.engines.sglang.messages import Begun, Finished, KvChange, Logprob
from kvmesh.errors import InternalError, InvalidRequestError, KvLostError, LostError, MeshError, OverloadedError

ENDS = {LegTask.PREFILL: FinishReason.HANDED_OFF, LegTask.EMBED: FinishReason.STOP}
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
OVERLOAD_RETRY_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class SglangLeg:
    """A leg in the engine process. `is_in_handoff`: in an engine that takes part in handoffs. `is_moved`: the engine ended it to change its
    role."""

    request: EngineRequest
    number: int
    is_in_handoff: bool
    adapter_id: str = ""
    is_cancelled: bool = False
    is_moved: bool = False
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    queue_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens that SGLang takes as the prompt."""
        generation = self.request.generation
        return len(generation.token_ids) + len(generation.emitted_token_ids)

    @property
    def is_prefill(self) -> bool:
        return self.request.task is LegTask.PREFILL

    def begin(self, begun: Begun) -> None:
        """A decode engine reports what the prefill engine found in its cache; all KV comes from there."""
        self.queue_s, self.cached_tokens = begun.queue_s, begun.cached_tokens
        if self.is_in_handoff and not self.is_prefill:
            self.transferred_tokens = self.prompt_tokens

    def finish(self, end: Finished) -> EngineFinish:
        """Returns the leg's end as SGLang reports it. A cancel may have come too late."""
        reason, error = self._outcome(end)
        return EngineFinish(
            key=self.request.key,
            reason=reason,
            error=error,
            usage=Usage(
                prompt_tokens=len(self.request.generation.token_ids),
                output_tokens=self.output_tokens,
                cached_tokens=self.cached_tokens,
                transferred_tokens=self.transferred_tokens,
            ),
            stop_token_id=end.matched if reason is FinishReason.STOP else None,
            embedding=end.embedding if reason is FinishReason.STOP else None,
            queue_s=self.queue_s,
        )

    def _outcome(self, end: Finished) -> tuple[FinishReason, MeshError | None]:
        if end.kind in REASONS:
            # A prefill or embedding request ends by its length.
            return ENDS.get(self.request.task, REASONS[end.kind]), None
        if self.is_cancelled:
            return FinishReason.CANCELLED, None
        if self.is_moved:
            return FinishReason.ERROR, LostError("the worker has changed its role", reason="role_changed")
        return FinishReason.ERROR, self._error(end)

    def _error(self, end: Finished) -> MeshError:
        if end.status == HTTPStatus.BAD_REQUEST:
            is_constraint = self.request.generation.sampling.constraint is not None
            return InvalidRequestError(
                f"SGLang refused the request: {end.message}",
                field="generation.sampling.constraint" if is_constraint else "generation",
                reason="constraint_unmet" if is_constraint else "",
            )
        if end.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return OverloadedError(f"SGLang refused the request: {end.message}", retry_after_s=OVERLOAD_RETRY_S)
        if self.is_in_handoff:
            return KvLostError(f"the handoff failed: {end.message}", reason="handoff_failed")
        return InternalError(f"SGLang failed the request: {end.message}", reason="engine_error")


def cancelled(leg: SglangLeg) -> EngineFinish:
    """Returns the end of a leg whose engine closes."""
    leg.is_cancelled = True
    return leg.finish(Finished(number=leg.number, kind="abort"))


def token_logprobs(entries: Sequence[Logprob], alternatives: int | None) -> list[TokenLogprob]:
    """With at most `alternatives`: SGLang gives the same number for the prompt and for the output."""
    count = alternatives or 0
    return [
        TokenLogprob(logprob=value, alternatives=[(token_id, other) for token_id, other in others[:count]])
        for value, others in entries
    ]


def kv_events(changes: Sequence[KvChange]) -> list[KvEvent]:
    return [_kv_event(change) for change in changes]


def _kv_event(change: KvChange) -> KvEvent:
    kind, hashes, parent, tier = change
    if kind == "stored":
        return KvStored(block_hashes=hashes, parent_hash=parent, tier=KvTier(tier))
    if kind == "removed":
        return KvRemoved(block_hashes=hashes, tier=KvTier(tier))
    return KvCleared()


def asked_logprobs(leg: SglangLeg, entries: Mapping[int, Sequence[Logprob]]) -> list[TokenLogprob] | None:
    """Returns the log-probabilities of a step's tokens, for a leg that asked for them."""
    asked = leg.request.generation.sampling.logprobs
    if asked is None or leg.number not in entries:
        return None
    return token_logprobs(entries[leg.number], asked)
