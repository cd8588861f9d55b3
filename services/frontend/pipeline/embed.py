"""Runs embedding requests: tokenises the inputs, places the request, runs one leg per input on the chosen worker."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmesh.checks import PRIORITY_MAX, check_range
from kvmesh.clock import Clock
from kvmesh.core import Ask, Generation, Leg, LegFinish, LegTask, Report, ReportKind, Role, SamplingParams, Usage
from kvmesh.errors import (
    InternalError,
    InvalidRequestError,
    MeshError,
    UnsupportedError,
)
from kvmesh.lifecycle import run_together
from kvmesh.rpc.clients import EmbedResult, LegLink, LegLinks, Placed, RouterLink
from kvmesh.rpc.whole_leg import run_leg
from services.frontend.models import ServedModel
from services.frontend.pipeline.losses import LostWorkers
from services.frontend.pipeline.placements import LINK_TIMEOUT_S, RETRIABLE, RequestPlacements
from services.frontend.pipeline.prepare import tokens_of
from services.frontend.pipeline.request import Request
from services.frontend.pipeline.retry_budget import RetryBudget
from services.frontend.settings import PipelineSettings

EMBEDDINGS = "embeddings"
INPUTS_MAX = 2048
"""Inputs of one request: OpenAI's limit."""
LEGS_MAX = 64
"""Inputs of one request that run concurrently. More would only fill the worker's queue, because the engine does not batch more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Texts or token ids to embed.

    `asked` carries the model and the fields that all requests share; its prompt and sampling are not used. `dimensions` None:
    the model's own. `inputs_name`: the client's name of the inputs, for error messages.
    """

    asked: Request
    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None
    inputs_name: str = "input"


class Embedder:
    """Runs embedding requests. Has no state. The router receives exactly one end of each placement."""

    def __init__(
        self,
        *,
        links: LegLinks,
        router: RouterLink,
        clock: Clock,
        settings: PipelineSettings,
        lost_workers: LostWorkers,
    ) -> None:
        self._links = links
        self._router = router
        self._clock = clock
        self._settings = settings
        self._lost_workers = lost_workers

    async def tokens(self, request: EmbedRequest, model: ServedModel) -> list[Sequence[int]]:
        """Checks the request and tokenises its inputs. Raises errors of the client."""
        if EMBEDDINGS not in model.features:
            raise UnsupportedError(
                f"no worker of {model.name} supports embeddings", field="model", reason="embeddings_unsupported"
            )
        check_range(request.asked.priority, "priority", low=-PRIORITY_MAX, high=PRIORITY_MAX)
        if not 1 <= len(request.inputs) <= INPUTS_MAX:
            name = request.inputs_name
            raise InvalidRequestError(f"{name} must have 1 to {INPUTS_MAX} entries", field=name, reason="invalid_value")
        return [await self._tokens_of_input(request, model, i) for i in range(len(request.inputs))]

    async def _tokens_of_input(self, request: EmbedRequest, model: ServedModel, i: int) -> Sequence[int]:
        name = request.inputs_name if len(request.inputs) == 1 else f"{request.inputs_name}[{i}]"
        one = replace(request.asked, prompt=request.inputs[i], sampling=SamplingParams(), fields={"prompt": name})
        token_ids = await tokens_of(one, model)
        if not token_ids:
            raise InvalidRequestError(f"{name} must not be empty", field=name)
        if len(token_ids) >= model.context_tokens_max:
            raise InvalidRequestError(
                f"{name} has {len(token_ids)} tokens; the model accepts fewer than {model.context_tokens_max}",
                field=name,
                reason="context_length_exceeded",
            )
        return token_ids

    async def run(
        self,
        request: EmbedRequest,
        model: ServedModel,
        inputs: Sequence[Sequence[int]],
        *,
        tenant: str,
        budget: RetryBudget,
        deadline_s: float,
    ) -> EmbedResult:
        """Returns the vectors in the order of the inputs. Cancelling it cancels the legs."""
        asked = request.asked
        ask = Ask(
            request_id=asked.request_id,
            model=model.name,
            files_digest=model.files_digest,
            # Inputs that do not fit together run one after the other: no worker needs room for more than a context.
            prompt_tokens=min(sum(map(len, inputs)), model.context_tokens_max - 1),
            adapter=asked.adapter or model.adapter,
            tenant=tenant,
            priority=asked.priority,
            timeout_s=self._left_s(deadline_s),
            session_id=asked.session_id,
            required_features=(EMBEDDINGS,),
            required_labels=asked.required_labels,
            preferred_labels=asked.preferred_labels,
            pinned_decode_worker_id=asked.pinned_decode_worker_id,
            traceparent=asked.traceparent,
        )
        placements = RequestPlacements(
            asked,
            ask,
            router=self._router,
            clock=self._clock,
            settings=self._settings,
            lost_workers=self._lost_workers,
            budget=budget,
            deadline_s=deadline_s,
        )
        while True:
            # Before the placement, which only `_run_placed` settles.
            legs = _legs(request, model, inputs, placement_number=placements.number)
            placed = await placements.place()
            try:
                return await self._run_placed(placed, legs, deadline_s)
            except RETRIABLE as error:
                worker_id = placed.placement.decode.worker_id
                placements.count_failure(error, failed_worker_id=worker_id, has_progress=False)
                placements.next(ask, error, emitted_tokens=0)

    async def _run_placed(self, placed: Placed, legs: Sequence[Leg], deadline_s: float) -> EmbedResult:
        """Runs the legs of one placement and reports its end to the router."""
        began_s = self._clock.now()
        worker = placed.placement.decode
        if (rank := worker.data_parallel_rank) is not None:
            legs = [replace(leg, generation=replace(leg.generation, data_parallel_rank=rank)) for leg in legs]

        def report(
            kind: ReportKind,
            *,
            error: MeshError | None = None,
            failed_worker_id: str = "",
            cached_tokens: int | None = None,
        ) -> None:
            news = Report(
                kind=kind,
                elapsed_s=self._clock.now() - began_s,
                cached_tokens=cached_tokens,
                error=error,
                failed_worker_id=failed_worker_id,
            )
            self._router.report_nowait(placed.ask_id, news)

        try:
            timeout_s = min(self._left_s(deadline_s), LINK_TIMEOUT_S)
            link = await self._links.link(worker, Role.DECODE, timeout_s=timeout_s)
            result = await self._run_legs(link, legs, deadline_s)
        except MeshError as error:
            report(ReportKind.FAILED, error=error, failed_worker_id=worker.worker_id)
            raise
        except asyncio.CancelledError:
            report(ReportKind.CANCELLED)
            raise
        except BaseException:
            # Names no worker: the router would hold it responsible.
            report(ReportKind.FAILED, error=InternalError("internal error of the frontend"))
            raise
        report(ReportKind.FINISHED, cached_tokens=result.usage.cached_tokens)
        return result

    async def _run_legs(self, link: LegLink, legs: Sequence[Leg], deadline_s: float) -> EmbedResult:
        """Runs the legs, LEGS_MAX at a time. The first failure cancels the others."""
        room = asyncio.Semaphore(LEGS_MAX)

        async def run(leg: Leg) -> LegFinish:
            async with room:
                # The time that is left after the wait for room.
                whole = await run_leg(link, leg, timeout_s=self._left_s(deadline_s))
            if whole.finish is None or whole.finish.embedding is None:
                raise InternalError("the worker returned no embedding", where=link.worker.worker_id)
            return whole.finish

        finishes = await run_together(*map(run, legs))
        return EmbedResult(
            vectors=[finish.embedding or () for finish in finishes],
            usage=Usage(
                prompt_tokens=sum(finish.usage.prompt_tokens for finish in finishes),
                cached_tokens=sum(finish.usage.cached_tokens for finish in finishes),
            ),
        )

    def _left_s(self, deadline_s: float) -> float:
        return max(1e-3, deadline_s - self._clock.now())


def _legs(
    request: EmbedRequest, model: ServedModel, inputs: Sequence[Sequence[int]], *, placement_number: int
) -> list[Leg]:
    asked = request.asked
    suffix = f"-{placement_number}" if placement_number else ""
    return [
        Leg(
            leg_id=f"{asked.request_id}-{i}{suffix}",
            task=LegTask.EMBED,
            generation=Generation(
                model=model.name,
                token_ids=token_ids,
                adapter=asked.adapter or model.adapter,
                cache_salt=asked.cache_salt,
                priority=asked.priority,
                traceparent=asked.traceparent,
            ),
            dimensions=request.dimensions,
        )
        for i, token_ids in enumerate(inputs)
    ]
