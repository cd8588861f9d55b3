"""The placements of one request, one after the other.

If a request causes a worker's death, each new placement would kill another worker. A worker whose engine failed reports that; a killed
process, a host that goes down and a broken network do not. So:

1. Two engines that died while they ran the request end it, with a reason that clients do not retry.
2. So do two broken connections in a row, to workers of one role that had generated no token, unless the frontend lost other workers at
   that time too.
3. Losses of workers of any kind, including unreachable ones, are counted, up to `LOSSES_MAX`.
4. Workers that send heartbeats but no tokens are counted separately, up to two.
5. A worker that falls silent before the first token of a request with a constraint may be busy compiling it. The request is then placed
   again only on this worker, when it is back. It ends if it loses the worker again, or if the worker does not return.
6. Refusals and lost KV are counted separately, up to `placement_attempts` placements without a token.
7. Over all requests of a model, `retry_budget` limits those that are placed again before their first token.
"""

from dataclasses import replace
from typing import Any, NoReturn

from kvmesh.clock import Clock
from kvmesh.core import Ask
from kvmesh.errors import (
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
from kvmesh.event_log import event_logger
from kvmesh.rpc.clients import Placed, RouterLink
from kvmesh.rpc.revoking import INTENTION_DENIED
from services.frontend.pipeline.losses import LostWorkers, RetryLimits
from services.frontend.pipeline.request import Request
from services.frontend.pipeline.retry_budget import RETRY_BUDGET_SPENT, RetryBudget
from services.frontend.settings import PipelineSettings

_log = event_logger(__name__)

RETRIABLE = (UnavailableError, LostError, KvLostError, OverloadedError)
"""Failures after which the same request may succeed on another worker, or on the same one later."""
SILENT = "worker_silent"
SILENT_WORKER_RETURNS_S = 15.0
"""Longest wait for a silent worker that may be compiling the request's constraint. Most breaks of a network end earlier."""
CLOCK_GRAIN_S = 1e-3
LINK_TIMEOUT_S = 5.0
"""Longest wait for a connection to a worker, longer than one connection attempt (3 s). Then the request is placed on another worker."""
RETRY_AFTER_S = 1.0
"""Retry-After of refused requests. Requests end many times a second, and Retry-After counts in whole seconds."""
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
        lost_workers: LostWorkers,
        budget: RetryBudget,
        deadline_s: float,
    ) -> None:
        self._request = request
        self._ask = ask
        self._router = router
        self._clock = clock
        self._settings = settings
        self._deadline_s = deadline_s
        self._excluded: list[str] = []
        self._pins: dict[str, Any] = {}
        """The ask's field that pins the silent worker, while no other worker may run the request."""
        self._pin_ends_s = 0.0
        self._first_failure: MeshError | None = None
        self._limits = RetryLimits(settings, lost_workers)
        self._budget = budget
        budget.requests += 1
        self.number = 0
        """Of the current placement. The first one is 0."""

    async def place(self) -> Placed:
        """Places the request. After a failure it waits up to `place_timeout_s` for a worker that takes it, unless Consul's intentions deny
        the frontend's calls: an operator has changed them, and clients get the answer at once.

        Raises the failure of the first placement when no worker takes the request again.
        """
        try:
            return await self._place_or_wait()
        except UnavailableError as error:
            if self._deadline_s - self._clock.now() <= CLOCK_GRAIN_S:
                # The deadline passed. The lack of a worker is not the cause that the client should see.
                raise DeadlineError("the request's deadline has passed") from error
            if self._first_failure is not None:
                # The worker's failure is more useful to the client than the lack of another worker.
                raise self._first_failure from error
            error.retry_after_s = error.retry_after_s or RETRY_AFTER_S
            raise
        except OverloadedError as error:
            if self._first_failure is not None:
                raise self._first_failure from error
            raise
        except (NotFoundError, UnsupportedError) as error:
            error.field = self._request.named(error.field)
            raise

    def count_failure(
        self, error: MeshError, *, failed_worker_id: str, has_progress: bool, is_prefill: bool = False
    ) -> None:
        """Records a failure of the current placement. Raises the error that ends the request if it may not be placed again.

        `has_progress`: the placement generated a token. `is_prefill`: the failed worker is the prefill worker.
        """
        if error.reason == INTENTION_DENIED:
            # Running legs end as lost, but no worker failed: clients get 503, whenever the permission ends.
            error = UnavailableError(error.message, reason=error.reason, where=error.where)
        if has_progress:
            self._pins = {}
        elif self._pins and isinstance(error, LostError | UnavailableError):
            if isinstance(error, LostError) or self._clock.now() >= self._pin_ends_s:
                self._raise_as_poisonous(self._first_failure, error)
            return  # The worker is still away.
        elif error.reason == SILENT and self._request.sampling.constraint is not None:
            self._pin(failed_worker_id, error, is_prefill=is_prefill)
            return
        self._first_failure = self._first_failure or error
        end = self._limits.count_failure(error, has_progress=has_progress, is_prefill=is_prefill, now=self._clock.now())
        if end is not None:
            if end is not error:
                self._raise_as_poisonous(end, error)
            raise error
        if failed_worker_id:
            self._excluded.append(failed_worker_id)

    def _pin(self, worker_id: str, error: MeshError, *, is_prefill: bool) -> None:
        """The next placements are on this worker only."""
        self._pins = {"pinned_prefill_worker_id" if is_prefill else "pinned_decode_worker_id": worker_id}
        self._pin_ends_s = self._clock.now() + SILENT_WORKER_RETURNS_S
        self._first_failure = InternalError(
            "a worker went silent, perhaps while it compiled this request's constraint; the request is not placed on another worker",
            reason=WORKER_LOST_TWICE,
            where=error.where,
        )

    def _raise_as_poisonous(self, end: MeshError | None, error: MeshError) -> NoReturn:
        _log.error(
            "request_stopped_as_poisonous", request_id=self._request.request_id, reason=error.reason, where=error.where
        )
        assert end is not None
        raise end from error

    def next(self, ask: Ask, error: MeshError, *, emitted_tokens: int) -> None:
        """Begins the next placement, with `ask`. `emitted_tokens`: those after which the answer continues.

        Raises OverloadedError for a request without a token if too many were placed again.
        """
        if not emitted_tokens and not self._pins and not self._budget.take_nowait(self._clock.now()):
            _log.warning(
                "retry_budget_spent", request_id=self._request.request_id, reason=error.reason, where=error.where
            )
            raise OverloadedError(
                f"the request failed ({error.reason}) and is not tried on another worker, because too many requests are being retried",
                reason=RETRY_BUDGET_SPENT,
                retry_after_s=RETRY_AFTER_S,
                where=error.where,
            ) from error
        self._ask = ask
        self.number += 1
        _log.warning(
            "request_placed_again",
            request_id=self._request.request_id,
            reason=error.reason,
            where=error.where,
            emitted_tokens=emitted_tokens,
        )

    @property
    def _is_denied(self) -> bool:
        return self._first_failure is not None and self._first_failure.reason == INTENTION_DENIED

    async def _place_or_wait(self) -> Placed:
        wait_until_s = min(self._deadline_s, max(self._pin_ends_s, self._clock.now() + self._settings.place_timeout_s))
        # The worker has just fallen silent and needs time to return.
        if self._pins:
            await self._clock.sleep(PLACE_AGAIN_S)
        while True:
            is_full, ask = False, self._ask
            left_s = max(1e-3, self._deadline_s - self._clock.now())
            if self.number:
                # Without the pinned worker, or no worker could take the request.
                excluded = tuple(each for each in self._excluded if each not in self._pins.values())
                ask = replace(ask, timeout_s=left_s, excluded_worker_ids=excluded, attempt=self.number, **self._pins)
            try:
                return await self._router.place(ask, timeout_s=min(left_s, self._settings.place_timeout_s))
            except NotFoundError as error:
                if not self._pins:
                    raise
                if self._clock.now() >= wait_until_s:
                    assert self._first_failure is not None
                    raise self._first_failure from error
            except UnavailableError as error:
                may_wait = self._first_failure is not None and self._clock.now() < wait_until_s and not self._is_denied
                may_end = error.reason in NO_WORKER_NOW or bool(self._pins)
                if not may_end or not (self._excluded or may_wait):
                    raise
            except OverloadedError:
                # Other requests must wait too when a lost worker's requests move to the remaining workers.
                is_full = True
                if self._first_failure is None or self._clock.now() >= wait_until_s:
                    raise
            if self._excluded and not is_full:
                # Every worker has failed under this request. One of them may have been replaced by a new process.
                self._excluded.clear()
            else:
                await self._clock.sleep(PLACE_AGAIN_S)
