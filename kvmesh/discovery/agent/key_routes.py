"""/v1/kv and /v1/session."""

import uuid
from collections.abc import Callable

from aiohttp import web

from kvmesh.discovery import limits
from kvmesh.discovery.agent import requests, shapes
from kvmesh.discovery.agent.answering import Answering, answer, index_headers
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.agent.state import AgentState
from kvmesh.discovery.settings import AgentSettings
from kvmesh.errors import InvalidRequestError


class KeyRoutes:
    """Keys, locks and sessions."""

    def __init__(self, *, live: LiveState, answering: Answering, node: shapes.Node, settings: AgentSettings) -> None:
        self._live = live
        self._answering = answering
        self._node = node
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/kv/{key:.*}", self.get),
            web.put("/v1/kv/{key:.*}", self.put),
            web.delete("/v1/kv/{key:.*}", self.delete),
            web.put("/v1/session/create", self.create),
            web.put("/v1/session/renew/{id}", self.renew),
            web.put("/v1/session/destroy/{id}", self.destroy),
            web.get("/v1/session/info/{id}", self.info),
            web.get("/v1/session/list", self.list),
        ]

    async def get(self, request: web.Request) -> web.StreamResponse:
        """One key, `raw` or not, or with `recurse` or `keys` all under a prefix. 404 when there is none.

        It blocks on changes of any key, which Consul's API allows and its clients must expect.
        """
        key, is_prefix = request.match_info["key"], "recurse" in request.query or "keys" in request.query
        limits.check_key(key, field="prefix" if is_prefix else "key")
        keys = self._live.state.keys
        response = await self._answering.read(request, lambda: keys.index, lambda: self._found(request, key))
        found = self._found(request, key)
        if not found:
            return web.Response(status=404, headers=index_headers(keys.index))
        record = keys.get(key)
        if "raw" in request.query and not is_prefix and record is not None:
            return web.Response(body=record.value, headers=index_headers(keys.index))
        return response

    def _found(self, request: web.Request, key: str) -> list[shapes.Json] | list[str]:
        keys = self._live.state.keys
        if "keys" in request.query:
            return _names([record.key for record in keys.under(key)], key, request.query.get("separator", ""))
        if "recurse" in request.query:
            return [shapes.key_shape(record) for record in keys.under(key)]
        record = keys.get(key)
        return [shapes.key_shape(record)] if record is not None else []

    async def put(self, request: web.Request) -> web.Response:
        """Sets a value: always, with `cas`, or with a lock taken (`acquire`) or given back (`release`)."""
        key, query = request.match_info["key"], request.query
        limits.check_key(key)
        value = await request.read()
        limits.check_value(value)
        flags = requests.number(query.get("flags", "0"), "flags")
        if sum(word in query for word in ("cas", "acquire", "release")) > 1:
            raise InvalidRequestError("only one of cas, acquire and release can be given", field="cas")
        return answer(request, self._live.change(_writing(key, value, flags, dict(query))))

    async def delete(self, request: web.Request) -> web.Response:
        """Removes a key, with `cas` on condition, or with `recurse` all under a prefix."""
        key, query = request.match_info["key"], request.query
        is_prefix = "recurse" in query
        limits.check_key(key, field="prefix" if is_prefix else "key")
        expected_index = requests.number(query["cas"], "cas") if "cas" in query else None

        def remove(state: AgentState, now: float) -> bool:
            if not is_prefix:
                return state.keys.delete(key, expected_index=expected_index)
            for record in state.keys.under(key):
                state.keys.delete(record.key)
            return True

        return answer(request, self._live.change(remove))

    async def create(self, request: web.Request) -> web.Response:
        definition = requests.session_definition(await request.read(), self._settings)
        session_id = str(uuid.uuid4())
        self._live.change(lambda state, now: state.sessions.create(session_id, definition, now))
        return answer(request, {"ID": session_id})

    async def renew(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        session = self._live.change(lambda state, now: state.sessions.renew(session_id, now))
        return answer(request, [shapes.session_shape(self._node, session)])

    async def destroy(self, request: web.Request) -> web.Response:
        """Ends a session, if there is one."""
        session_id = request.match_info["id"]
        self._live.change(lambda state, now: state.destroy_session(session_id, now))
        return answer(request, True)

    async def info(self, request: web.Request) -> web.Response:
        """One session in a list, or an empty list."""
        session = self._live.state.sessions.get(request.match_info["id"])
        return answer(request, [shapes.session_shape(self._node, session)] if session is not None else [])

    async def list(self, request: web.Request) -> web.Response:
        sessions = self._live.state.sessions
        return await self._answering.read(
            request,
            lambda: sessions.index,
            lambda: [shapes.session_shape(self._node, session) for session in sessions.all()],
        )


def _writing(key: str, value: bytes, flags: int, query: dict[str, str]) -> Callable[[AgentState, float], bool]:
    if "acquire" in query:
        return lambda state, now: state.acquire(key, query["acquire"], value, flags=flags, now=now)
    if "release" in query:
        return lambda state, now: state.keys.release(key, query["release"], value, flags=flags)
    expected_index = requests.number(query["cas"], "cas") if "cas" in query else None
    return lambda state, now: state.keys.put(key, value, flags=flags, expected_index=expected_index)


def _names(keys: list[str], prefix: str, separator: str) -> list[str]:
    if not separator:
        return keys
    cut = (key[: key.find(separator, len(prefix)) + 1] or key for key in keys)
    return list(dict.fromkeys(cut))
