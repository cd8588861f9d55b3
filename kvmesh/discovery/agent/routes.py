"""The part of Consul's HTTP API that the mesh, Prometheus and people with curl use: services, keys, locks and sessions."""

import uuid
from collections.abc import Sequence

from aiohttp import web

from kvmesh.discovery import limits
from kvmesh.discovery.agent import requests, shapes
from kvmesh.discovery.agent.answering import BlockingQueries, index_headers, json_response
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.agent.records import Service
from kvmesh.discovery.agent.state import AgentState
from kvmesh.errors import InvalidRequestError


class AgentRoutes:
    """The handlers. Each change goes through `LiveState.change`, which wakes blocking queries."""

    def __init__(self, *, live: LiveState, queries: BlockingQueries, node: shapes.Node) -> None:
        self._live = live
        self._queries = queries
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put("/v1/agent/service/register", self.register),
            web.put("/v1/agent/service/deregister/{id}", self.deregister),
            web.put("/v1/agent/service/maintenance/{id}", self.maintenance),
            web.put("/v1/agent/check/update/{id}", self.update_check),
            web.get("/v1/agent/services", self.agent_services),
            web.get("/v1/agent/self", self.agent_self),
            web.get("/v1/catalog/services", self.catalog_services),
            web.get("/v1/health/service/{name}", self.health_service),
            web.get("/v1/status/leader", self.leader),
            web.get("/v1/kv/{key:.*}", self.get_key),
            web.put("/v1/kv/{key:.*}", self.put_key),
            web.delete("/v1/kv/{key:.*}", self.delete_key),
            web.put("/v1/session/create", self.create_session),
            web.put("/v1/session/renew/{id}", self.renew_session),
            web.put("/v1/session/destroy/{id}", self.destroy_session),
        ]

    # Services

    async def register(self, request: web.Request) -> web.Response:
        definition = requests.service_definition(await request.read())
        self._live.change(lambda state, now: state.catalog.register(definition, now))
        return web.Response()

    async def deregister(self, request: web.Request) -> web.Response:
        service_id = request.match_info["id"]
        self._live.change(lambda state, now: state.catalog.deregister(service_id))
        return web.Response()

    async def maintenance(self, request: web.Request) -> web.Response:
        enable = request.query.get("enable", "")
        if enable not in ("true", "false"):
            raise InvalidRequestError("enable must be true or false", field="enable")
        service_id, reason = request.match_info["id"], request.query.get("reason", "")[: limits.NOTE_LENGTH_MAX]
        self._live.change(lambda state, now: state.catalog.set_maintenance(service_id, enable == "true", reason))
        return web.Response()

    async def update_check(self, request: web.Request) -> web.Response:
        (status, output), check_id = requests.heartbeat(await request.read()), request.match_info["id"]
        self._live.change(lambda state, now: state.catalog.heartbeat(check_id, status, output, now=now))
        return web.Response()

    async def agent_services(self, request: web.Request) -> web.Response:
        """Returns all instances by id."""
        services = self._live.state.catalog.services
        shape = {service_id: shapes.agent_service(service) for service_id, service in services.items()}
        return json_response(request, shape)

    async def agent_self(self, request: web.Request) -> web.Response:
        return json_response(request, shapes.self_shape(self._node))

    async def catalog_services(self, request: web.Request) -> web.Response:
        """Returns all service names with their tags."""
        return await self._queries.read(request, lambda: self._live.state.catalog.index, self._service_names)

    async def health_service(self, request: web.Request) -> web.Response:
        """Returns the instances of a service with their checks."""
        name, tags = request.match_info["name"], request.query.getall("tag", [])
        is_passing_only = request.query.get("passing", "false") in ("", "1", "true")
        return await self._queries.read(
            request,
            lambda: self._live.state.catalog.name_index(name),
            lambda: [
                shapes.health_entry(self._node, service)
                for service in self._instances(name, tags)
                if service.is_passing or not is_passing_only
            ],
        )

    async def leader(self, request: web.Request) -> web.Response:
        return json_response(request, f"{self._node.address}:{self._node.port}")

    def _service_names(self) -> dict[str, list[str]]:
        names: dict[str, set[str]] = {}
        for service in self._live.state.catalog.services.values():
            names.setdefault(service.definition.name, set()).update(service.definition.tags)
        return {name: sorted(tags) for name, tags in sorted(names.items())}

    def _instances(self, name: str, tags: Sequence[str]) -> list[Service]:
        found = self._live.state.catalog.instances(name)
        return [service for service in found if set(tags) <= set(service.definition.tags)]

    # Keys, locks and sessions

    async def get_key(self, request: web.Request) -> web.Response:
        """Returns one key, or all keys under a prefix with `recurse`. 404 when there is none.

        A blocking query returns on a change of any key. Consul's API allows that, so its clients expect it.
        """
        key, is_prefix = request.match_info["key"], "recurse" in request.query
        limits.check_key(key, field="prefix" if is_prefix else "key")
        keys = self._live.state.keys

        def found() -> list[shapes.Json]:
            records = keys.under(key) if is_prefix else [keys.get(key)]
            return [shapes.key_shape(record) for record in records if record is not None]

        response = await self._queries.read(request, lambda: keys.index, found)
        return response if found() else web.Response(status=404, headers=index_headers(keys.index))

    async def put_key(self, request: web.Request) -> web.Response:
        """Sets a value: unconditionally, with `cas`, or while it takes (`acquire`) or returns (`release`) the key's lock."""
        key, query = request.match_info["key"], request.query
        limits.check_key(key)
        value = await request.read()
        limits.check_value(value)
        if sum(word in query for word in ("cas", "acquire", "release")) > 1:
            raise InvalidRequestError("only one of cas, acquire and release can be given", field="cas")
        expected_index = requests.number(query["cas"], field="cas") if "cas" in query else None

        def write(state: AgentState, now: float) -> bool:
            if "acquire" in query:
                return state.acquire(key, session_id=query["acquire"], value=value, now=now)
            if "release" in query:
                return state.keys.release(key, session_id=query["release"], value=value)
            return state.keys.put(key, value, expected_index=expected_index)

        return json_response(request, self._live.change(write))

    async def delete_key(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        limits.check_key(key)
        self._live.change(lambda state, now: state.keys.delete(key))
        return json_response(request, True)

    async def create_session(self, request: web.Request) -> web.Response:
        definition = requests.session_definition(await request.read())
        session_id = str(uuid.uuid4())
        self._live.change(lambda state, now: state.sessions.create(session_id, definition, now))
        return json_response(request, {"ID": session_id})

    async def renew_session(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        session = self._live.change(lambda state, now: state.sessions.renew(session_id, now))
        return json_response(request, [shapes.session_shape(self._node, session)])

    async def destroy_session(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        self._live.change(lambda state, now: state.destroy_session(session_id, now))
        return json_response(request, True)
