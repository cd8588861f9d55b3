"""The part of Consul's HTTP API that the mesh, Prometheus and people with curl use."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from aiohttp import web

from kvmesh.discovery import limits
from kvmesh.discovery.agent import requests, shapes
from kvmesh.discovery.agent.answering import Answering, answer
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.agent.records import Service
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.base import Health
from kvmesh.discovery.settings import AgentSettings
from kvmesh.errors import InvalidRequestError

T = TypeVar("T")


class ServiceRoutes:
    """/v1/agent, /v1/catalog, /v1/health and /v1/status."""

    def __init__(self, *, live: LiveState, answering: Answering, node: shapes.Node, settings: AgentSettings) -> None:
        self._live = live
        self._answering = answering
        self._node = node
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put("/v1/agent/service/register", self.register),
            web.put("/v1/agent/service/deregister/{id}", self.deregister),
            web.put("/v1/agent/service/maintenance/{id}", self.maintenance),
            web.put("/v1/agent/check/update/{id}", self.check_update),
            web.get("/v1/agent/services", self.agent_services),
            web.get("/v1/agent/checks", self.agent_checks),
            web.get("/v1/agent/self", self.agent_self),
            web.get("/v1/catalog/datacenters", self.datacenters),
            web.get("/v1/catalog/nodes", self.nodes),
            web.get("/v1/catalog/services", self.catalog_services),
            web.get("/v1/catalog/service/{name}", self.catalog_service),
            web.get("/v1/health/service/{name}", self.health_service),
            web.get("/v1/health/state/{state}", self.health_state),
            web.get("/v1/status/leader", self.leader),
            web.get("/v1/status/peers", self.peers),
        ]

    async def register(self, request: web.Request) -> web.Response:
        definition = requests.service_definition(await request.read(), self._settings)
        self._change(lambda state, now: state.catalog.register(definition, now))
        return web.Response()

    async def deregister(self, request: web.Request) -> web.Response:
        """Removes an instance, if there is one."""
        service_id = request.match_info["id"]
        self._change(lambda state, now: state.catalog.deregister(service_id))
        return web.Response()

    async def maintenance(self, request: web.Request) -> web.Response:
        """Sets or removes the maintenance mark."""
        enable = request.query.get("enable", "")
        if enable not in ("true", "false"):
            raise InvalidRequestError("enable must be true or false", field="enable")
        service_id, reason = request.match_info["id"], request.query.get("reason", "")[: limits.NOTE_LENGTH_MAX]
        self._change(lambda state, now: state.catalog.set_maintenance(service_id, enable == "true", reason))
        return web.Response()

    async def check_update(self, request: web.Request) -> web.Response:
        beat, check_id = requests.heartbeat(await request.read()), request.match_info["id"]
        self._change(lambda state, now: state.catalog.heartbeat(check_id, beat.status, beat.output, now))
        return web.Response()

    async def agent_services(self, request: web.Request) -> web.Response:
        """All instances by id."""
        services = self._live.state.catalog.services
        return answer(request, {service_id: shapes.agent_service(service) for service_id, service in services.items()})

    async def agent_checks(self, request: web.Request) -> web.Response:
        """All checks by id."""
        return answer(request, {shape["CheckID"]: shape for shape in self._checks()})

    async def agent_self(self, request: web.Request) -> web.Response:
        return answer(request, shapes.self_shape(self._node))

    async def datacenters(self, request: web.Request) -> web.Response:
        return answer(request, [self._node.datacenter])

    async def nodes(self, request: web.Request) -> web.Response:
        return await self._answering.read(request, lambda: self._node.index, lambda: [shapes.node_shape(self._node)])

    async def catalog_services(self, request: web.Request) -> web.Response:
        return await self._answering.read(request, lambda: self._live.state.catalog.index, self._names)

    async def catalog_service(self, request: web.Request) -> web.Response:
        """The instances of a name, without health."""
        name, tags = request.match_info["name"], request.query.getall("tag", [])
        return await self._answering.read(
            request,
            lambda: self._live.state.catalog.name_index(name),
            lambda: [shapes.catalog_entry(self._node, service) for service in self._instances(name, tags)],
        )

    async def health_service(self, request: web.Request) -> web.Response:
        """The instances of a name with their checks."""
        name, tags = request.match_info["name"], request.query.getall("tag", [])
        is_passing_only = request.query.get("passing", "false") in ("", "1", "true")
        return await self._answering.read(
            request,
            lambda: self._live.state.catalog.name_index(name),
            lambda: [
                shapes.health_entry(self._node, service)
                for service in self._instances(name, tags)
                if service.is_passing or not is_passing_only
            ],
        )

    async def health_state(self, request: web.Request) -> web.Response:
        state = request.match_info["state"]
        if state not in ("any", *Health):
            raise InvalidRequestError("state must be any, passing, warning or critical", field="state")
        return await self._answering.read(
            request,
            lambda: self._live.state.catalog.index,
            lambda: [
                shape for shape in [shapes.node_check(self._node), *self._checks()] if state in ("any", shape["Status"])
            ],
        )

    async def leader(self, request: web.Request) -> web.Response:
        return answer(request, f"{self._node.address}:{self._node.port}")

    async def peers(self, request: web.Request) -> web.Response:
        return answer(request, [f"{self._node.address}:{self._node.port}"])

    def _names(self) -> dict[str, list[str]]:
        names: dict[str, set[str]] = {}
        for service in self._live.state.catalog.services.values():
            names.setdefault(service.definition.name, set()).update(service.definition.tags)
        return {name: sorted(tags) for name, tags in sorted(names.items())}

    def _instances(self, name: str, tags: Sequence[str]) -> list[Service]:
        found = self._live.state.catalog.instances(name)
        return [service for service in found if set(tags) <= set(service.definition.tags)]

    def _checks(self) -> list[shapes.Json]:
        services = self._live.state.catalog.services.values()
        return [shapes.check_shape(self._node, service, c) for service in services for c in service.checks.values()]

    def _change(self, decide: Callable[[AgentState, float], T]) -> T:
        return self._live.change(decide)
