"""The placements of one request, one after the other.

A request may be the cause of a worker's death, and each new placement would then cost another worker. A worker whose engine
failed reports it; a process that is killed, a host that goes down and a network that breaks do not. So:

1. Two engines that died while they ran the request end it, with a reason that clients do not retry.
2. Lost connections are counted apart, up to `worker_losses_max`: a process that crashes without a word may have been killed
   by the request, but most were not.
3. A worker that goes silent under a request with a constraint may be busy with compiling it, so that ends the request too.
4. Refusals and lost KV are counted apart from both, up to `placement_attempts` placements.
"""

import logging
from dataclasses import replace

from kvmesh.clock import Clock
from kvmesh.core import Ask
from kvmesh.errors import (
    ENGINE_DIED,
    WORKER_LOST_TWICE,
    DeadlineError,
    InternalError,
    KvLostError,
    LostError,
    MeshError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from kvmesh.rpc.clients import Placed, RouterLink
from services.frontend.pipeline.request import Request
from services.frontend.settings import PipelineSettings

_log = logging.getLogger(__name__)

RETRIABLE = (UnavailableError, LostError, KvLostError, OverloadedError)
"""Failures after which the same request may succeed on another worker, or on the same one later."""
SILENT = "worker_silent"
ENGINE_DEATHS_MAX = 2
"""One death may be an accident. A limit that operators could raise would let one request kill that many workers."""
CLOCK_GRAIN_S = 1e-3
NO_WORKER_NOW = ("no_worker", "no_prefill_worker", "breakers_open", "paths_open")
"""Reasons of router refusals that end when a worker returns."""
PLACE_AGAIN_S = 0.25
"""Time between two attempts to place a request that has lost its worker while no other one takes requests. Routers learn of a
returned worker, and of the end of a breaker's trial request, within this time; a refusal costs a router some microseconds."""


class RequestPlacements:
    """Places one request, and after a failure decides whether it is placed again and on which workers it is not."""

    def __init__(
        self,
        request: Request,
        ask: Ask,
        *,
        router: RouterLink,
        clock: Clock,
        settings: PipelineSettings,
        deadline_s: float,
    ) -> None:
        self._request = request
        self._ask = ask
        self._router = router
        self._clock = clock
        self._settings = settings
        self._deadline_s = deadline_s
        self._excluded: list[str] = []
        self._first_failure: MeshError | None = None
        self._limits = RetryLimits(settings)
        self.number = 0
        """Of the current placement. The first one is 0."""

    async def place(self) -> Placed:
        """Places the request. After a failure it waits up to `place_timeout_s` for a worker that takes it.

        Raises the failure of the first placement when no worker takes the request again.
        """
        try:
            return await self._place_or_wait()
        except UnavailableError as error:
            if self._deadline_s - self._clock.now() <= CLOCK_GRAIN_S:
                # The deadline passed. The lack of a worker is not the cause that the client should see.
                raise DeadlineError("the request's time is over") from error
            if self._first_failure is not None:
                # The failure of the worker tells the client more than the lack of another worker.
                raise self._first_failure from error
            error.retry_after_s = error.retry_after_s or self._settings.retry_after_s
            raise
        except (NotFoundError, UnsupportedError) as error:
            error.field = self._request.named(error.field)
            raise

    def check_retry(self, error: MeshError, *, failed_worker_id: str, is_answer_shown: bool) -> None:
        """Records a retriable failure of the current placement. Returns if the request is to be placed again.

        Raises the failure that ends the request otherwise.
        """
        self._first_failure = self._first_failure or error
        if error.reason == SILENT and self._request.sampling.constraint is not None and not is_answer_shown:
            raise InternalError(
                "a worker went silent while it compiled this request's constraint; the request is not tried on another",
                reason=WORKER_LOST_TWICE,
                where=error.where,
            ) from error
        end = self._limits.count_failure(error)
        if end is not None and end is not error:
            raise end from error
        if end is error or is_answer_shown:
            raise error
        if failed_worker_id:
            self._excluded.append(failed_worker_id)
        self.number += 1
        data = {"request_id": self._request.request_id, "reason": error.reason, "where": error.where}
        _log.warning("request_placed_again", extra={"data": data})

    async def _place_or_wait(self) -> Placed:
        wait_until_s = min(self._deadline_s, self._clock.now() + self._settings.place_timeout_s)
        while True:
            try:
                return await self._place_once()
            except UnavailableError as error:
                may_wait = self._first_failure is not None and self._clock.now() < wait_until_s
                if error.reason not in NO_WORKER_NOW or not (self._excluded or may_wait):
                    raise
            if self._excluded:
                # Every worker has failed under this request. One of them may have been replaced by a new process.
                self._excluded.clear()
            else:
                await self._clock.sleep(PLACE_AGAIN_S)

    async def _place_once(self) -> Placed:
        left_s = max(1e-3, self._deadline_s - self._clock.now())
        ask = self._ask
        if self.number:
            ask = replace(ask, timeout_s=left_s, excluded_worker_ids=tuple(self._excluded), attempt=self.number)
        return await self._router.place(ask, timeout_s=min(left_s, self._settings.place_timeout_s))


class RetryLimits:
    """Counts the failures of one request by kind. Pure."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._refusals = 0
        self._losses = 0
        self._engine_deaths = 0

    def count_failure(self, error: MeshError) -> MeshError | None:
        """Counts a retriable failure. Returns the error that ends the request, or None if it may be placed again."""
        if not isinstance(error, LostError):
            self._refusals += 1
            return error if self._refusals >= self._settings.placement_attempts else None
        self._losses += 1
        if error.reason in ENGINE_DIED:
            self._engine_deaths += 1
            if self._engine_deaths >= ENGINE_DEATHS_MAX:
                return InternalError(
                    f"the engines of {ENGINE_DEATHS_MAX} workers died while they ran this request; it is not tried again",
                    reason=WORKER_LOST_TWICE,
                    where=error.where,
                )
        return error if self._losses >= self._settings.worker_losses_max else None
