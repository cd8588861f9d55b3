"""Reads a mesh once: what the registry lists, what routers see, and what the planner plans."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core import RequestList, RequestState, RequestView, WorkerView
from kvmesh.core.planning import PlanReport
from kvmesh.discovery.base import PLANNER, ROUTER, SERVICES, Instance, Registry
from kvmesh.errors import MeshError
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.planner_client import GrpcPlannerClient
from kvmesh.rpc.router.client import GrpcRouterClient

ROUTERS_MAX = 16
"""Routers that are asked for requests: each knows those that it placed."""
PLANNERS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """A mesh at one time. `plan` None: there is no planner. `problems`: what could not be read, and why."""

    instances: Mapping[str, Sequence[Instance]] = field(default_factory=dict)
    """By service."""
    workers: Sequence[WorkerView] = ()
    """As one router sees them."""
    requests: RequestList = field(default_factory=RequestList)
    """Of all routers, newest first."""
    plan: PlanReport | None = None
    problems: Sequence[str] = ()


class MeshReader:
    """Reads meshes. `requests_max`: the newest requests of a view."""

    def __init__(self, registry: Registry, channels: ChannelPool, *, timeout_s: float, requests_max: int) -> None:
        self._registry = registry
        self._channels = channels
        self._timeout_s = timeout_s
        self._requests_max = requests_max

    async def read(self) -> MeshView:
        """Returns the mesh. Raises MeshError if the registry cannot be read; other failures are `problems` of the view."""
        views = await asyncio.gather(*(self._registry.instances(service) for service in SERVICES))
        instances = {view.service: view.instances for view in views}
        # Those that take requests come first, since `_workers` uses the first one that answers.
        routers = sorted(instances[ROUTER], key=lambda each: not each.takes_requests)[:ROUTERS_MAX]
        problems: list[str] = []
        workers, requests, plan = await asyncio.gather(
            self._workers(routers, problems),
            self._requests(routers, problems),
            self._plan(instances[PLANNER][:PLANNERS_MAX], problems),
        )
        return MeshView(
            instances=instances, workers=workers, requests=requests, plan=plan, problems=tuple(dict.fromkeys(problems))
        )

    async def _workers(self, routers: Sequence[Instance], problems: list[str]) -> Sequence[WorkerView]:
        """Asks the first router that answers."""
        for router in routers:
            try:
                return await GrpcRouterClient(self._channels, router.address).list_workers(timeout_s=self._timeout_s)
            except MeshError as error:
                problems.append(_problem(router, error))
        if not routers:
            problems.append("no router is registered")
        return ()

    async def _requests(self, routers: Sequence[Instance], problems: list[str]) -> RequestList:
        calls = [
            GrpcRouterClient(self._channels, router.address).list_requests(
                requests_max=self._requests_max, timeout_s=self._timeout_s
            )
            for router in routers
        ]
        lists: list[RequestList] = []
        for router, answer in zip(routers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, RequestList):
                lists.append(answer)
            elif isinstance(answer, MeshError):
                problems.append(_problem(router, answer))
            else:
                raise answer
        return merge_requests(lists, self._requests_max)

    async def _plan(self, planners: Sequence[Instance], problems: list[str]) -> PlanReport | None:
        """Returns the plan of the leader, else of the first planner that answers."""
        found: PlanReport | None = None
        for planner in planners:
            try:
                plan = await GrpcPlannerClient(self._channels, planner.address).get_plan(timeout_s=self._timeout_s)
            except MeshError as error:
                problems.append(_problem(planner, error))
                continue
            if plan.is_leader:
                return plan
            found = found or plan
        return found


def _problem(instance: Instance, error: MeshError) -> str:
    return f"{instance.instance_id}: {error.message}"


def merge_requests(lists: Iterable[RequestList], requests_max: int) -> RequestList:
    """Returns one list of all routers. Of a request that several routers placed the newest placement counts."""
    newest: dict[str, RequestView] = {}
    in_flight = queued = 0
    for each in lists:
        in_flight += each.requests_in_flight
        queued += each.requests_queued
        for view in each.requests:
            known = newest.get(view.request_id)
            if known is None or _age(view) > _age(known):
                newest[view.request_id] = view
    ordered = sorted(newest.values(), key=lambda view: -view.decided_at_s)
    return RequestList(requests=tuple(ordered[:requests_max]), requests_in_flight=in_flight, requests_queued=queued)


def _age(view: RequestView) -> tuple[int, bool, float]:
    return view.attempt, view.state is not RequestState.UNKNOWN, view.decided_at_s
