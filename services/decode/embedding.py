"""An embedding request as legs of the worker, and their ends as one answer. Pure."""

from collections.abc import Iterator, Sequence

from kvmesh.core import FinishReason, Generation, Usage
from kvmesh.engines.base import EngineDescription, EngineFinish, Leg
from kvmesh.errors import LostError, MeshError, UnsupportedError
from kvmesh.rpc.clients import EmbedCall, EmbedResult
from kvmesh.worker.worker import Submission

EMBEDDINGS = "embeddings"


def check_embed(description: EngineDescription) -> None:
    """UnsupportedError when the engine has no embeddings."""
    if EMBEDDINGS not in description.capabilities.features:
        raise UnsupportedError(f"{description.model.name} gives no embeddings", reason="embeddings_unsupported")


def embed_submissions(call: EmbedCall, timeout_s: float | None) -> Iterator[Submission]:
    """One leg per input."""
    for i, token_ids in enumerate(call.inputs):
        yield Submission(
            slot=0,
            request_id=f"{call.request_id}.{i}",
            leg=Leg.EMBED,
            generation=Generation(
                model=call.model,
                token_ids=token_ids,
                adapter=call.adapter,
                priority=call.priority,
                traceparent=call.traceparent,
            ),
            timeout_s=timeout_s,
            dimensions=call.dimensions,
        )


def embed_result(finishes: Sequence[EngineFinish]) -> EmbedResult:
    """The vectors. LostError when the engine stopped a leg, which no caller asked for."""
    vectors = [finish.embedding for finish in finishes if finish.reason is FinishReason.STOP]
    if len(vectors) < len(finishes) or None in vectors:
        raise LostError("the engine stopped an input", reason="engine_error")
    return EmbedResult(
        vectors=[vector for vector in vectors if vector is not None],
        usage=Usage(
            prompt_tokens=sum(finish.usage.prompt_tokens for finish in finishes),
            cached_tokens=sum(finish.usage.cached_tokens for finish in finishes),
        ),
    )


def first_failure(errors: "ExceptionGroup[MeshError]") -> MeshError:
    """One of the failures of a group."""
    first = errors.exceptions[0]
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first
