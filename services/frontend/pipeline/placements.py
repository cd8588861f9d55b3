"""Whether a request that failed on its workers is placed again. Pure.

A request may be the cause of a worker's death, and each new placement would then cost another worker. A worker whose engine
failed reports it; a process that is killed, a host that goes down and a network that breaks do not. So:

1. Two engines that died while they ran the request end it, with a reason that clients do not retry.
2. Lost connections are counted apart, up to `worker_losses_max`: a process that crashes without a word may have been killed
   by the request, but most were not.
3. Refusals and lost KV are counted apart from both, up to `placement_attempts` placements.
"""

from kvmesh.errors import ENGINE_DIED, WORKER_LOST_TWICE, InternalError, LostError, MeshError
from services.frontend.settings import PipelineSettings

ENGINE_DEATHS_MAX = 2
"""One death may be an accident. A limit that operators could raise would let one request kill that many workers."""


class Replacing:
    """Counts the failures of one request."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._refusals = 0
        self._losses = 0
        self._engine_deaths = 0

    def end_of(self, error: MeshError) -> MeshError | None:
        """Counts a failure that another placement may mend. The error that ends the request; None: it is placed again."""
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
