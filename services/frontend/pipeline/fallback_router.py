"""A link to the routers that places requests itself while no router answers."""

from collections.abc import Callable, Sequence

from kvmesh.core import Ask, Placement, Report
from kvmesh.core.routing import SETTLING
from kvmesh.errors import UnavailableError
from kvmesh.event_log import event_logger
from kvmesh.rpc.clients import Placed, RouterLink
from services.frontend.model_cards import Described
from services.frontend.pipeline.local_placement import LocalPlacer

_log = event_logger(__name__)
NO_ROUTER = "no_router"
WITHOUT_ROUTER_AFTER_S = 1.0
"""Time for which a request waits for a router while none is reachable: the longest pause between two attempts. Then the frontend places it."""
FindWorkers = Callable[[str], Sequence[Described]]
"""The workers of a model as the registry last listed them."""


class FallbackRouterLink:
    """Implements RouterLink. Routers place requests; without one, `LocalPlacer` does.

    1. A frontend whose registry has never listed a router places nothing itself, because then its settings are probably wrong.
    2. Requests that were placed here are never reported to a router: it learns of them from the workers' load.
    """

    def __init__(
        self,
        routers: RouterLink,
        placer: LocalPlacer,
        *,
        knows_router: Callable[[], bool],
        workers: FindWorkers,
        on_placed: Callable[[], None],
    ) -> None:
        """`knows_router`: see GrpcRouterLink. `on_placed` is called for each placement made here."""
        self._routers = routers
        self._placer = placer
        self._knows_router = knows_router
        self._workers = workers
        self._on_placed = on_placed
        self._placed: dict[int, Placement] = {}
        self._asks = 0
        self._is_alone = False

    async def place(self, ask: Ask, *, timeout_s: float) -> Placed:
        """See RouterLink."""
        try:
            placed = await self._routers.place(ask, timeout_s=timeout_s)
        except UnavailableError as error:
            if error.reason != NO_ROUTER or not self._knows_router():
                raise
            return self._place_here(ask)
        if self._is_alone:
            self._is_alone = False
            _log.info("router_returned")
        return placed

    def _place_here(self, ask: Ask) -> Placed:
        placement = self._placer.place(ask, self._workers(ask.model))
        # Numbers below 0 are this link's own; those of the routers' link count from 1.
        self._asks -= 1
        self._placed[self._asks] = placement
        self._on_placed()
        if not self._is_alone:
            self._is_alone = True
            _log.warning("placing_without_router", policy="least_loaded")
        return Placed(ask_id=self._asks, placement=placement)

    def report_nowait(self, ask_id: int, report: Report) -> None:
        """See RouterLink."""
        if ask_id > 0:
            self._routers.report_nowait(ask_id, report)
        elif report.kind in SETTLING and (placement := self._placed.pop(ask_id, None)) is not None:
            self._placer.settle(placement)
