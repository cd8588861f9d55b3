"""How the agent answers: JSON, index headers, blocking queries, errors, token."""

import asyncio
import hmac
import json
import logging
import random
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvmesh.discovery.agent import requests
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.limits import VALUE_BYTES_MAX
from kvmesh.discovery.settings import AgentSettings
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Consul answers what it does not know with 500 here and 404 there; 404 everywhere is what its later versions do.
_STATUS: tuple[tuple[type[MeshError], int], ...] = (
    (InvalidRequestError, 400),
    (UnauthenticatedError, 403),
    (PermissionDeniedError, 403),
    (NotFoundError, 404),
    (OverloadedError, 429),
)


class Answering:
    """Blocking queries, and the limit on how many wait at once."""

    def __init__(self, live: LiveState, settings: AgentSettings, generator: random.Random) -> None:
        self._live = live
        self._settings = settings
        self._generator = generator
        self._watchers = 0

    @property
    def watchers(self) -> int:
        return self._watchers

    async def read(
        self, request: web.Request, index_of: Callable[[], int], body_of: Callable[[], object]
    ) -> web.Response:
        """Answers with `body_of()`; with `index` in the query not before `index_of()` differs from it or the wait ends.

        An index from the future (of an agent before this one) is answered at once, so that the client starts anew.
        """
        if "filter" in request.query:
            raise InvalidRequestError("filter expressions are not supported by the embedded agent", field="filter")
        seen = requests.number(request.query.get("index", "0"), "index")
        wait_s = requests.wait_s(request.query.get("wait"), self._settings)
        if seen > 0 and index_of() == seen:
            await self._wait(seen, index_of, wait_s)
        return answer(request, body_of(), index=index_of())

    async def _wait(self, seen: int, index_of: Callable[[], int], wait_s: float) -> None:
        if self._watchers >= self._settings.watchers_max:
            raise OverloadedError(f"{self._watchers} blocking queries wait already", reason="watchers_max")
        self._watchers += 1
        try:
            # Consul's jitter, so that clients with one wait do not come back together.
            async with asyncio.timeout(wait_s * (1.0 + self._generator.random() / 16)):
                while index_of() == seen and not self._live.is_closing:
                    await self._live.wait_change()
        except TimeoutError:
            return
        finally:
            self._watchers -= 1


def answer(request: web.Request, body: object, *, index: int = 0) -> web.Response:
    """JSON, for people when the query says `pretty`."""
    text = json.dumps(body, indent=4 if "pretty" in request.query else None, separators=None)
    return web.Response(text=text + "\n", content_type="application/json", headers=index_headers(index))


def index_headers(index: int) -> dict[str, str]:
    """The headers of an answer that can be waited on; none for index 0."""
    if index <= 0:
        return {}
    return {"X-Consul-Index": str(index), "X-Consul-KnownLeader": "true", "X-Consul-LastContact": "0"}


def middlewares(settings: AgentSettings) -> list[Middleware]:
    """Errors become statuses; a token, where one is set, is asked for."""

    @web.middleware
    async def translate(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            _check_token(request, settings.token)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            limit = VALUE_BYTES_MAX
            return web.Response(status=413, text=f"Request body too large, max size: {limit} bytes.")
        except MeshError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            return web.Response(status=status, text=error.message)

    return [translate]


def _check_token(request: web.Request, token: str) -> None:
    if not token:
        return
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = (
        request.headers.get("X-Consul-Token") or request.query.get("token") or (bearer if scheme == "Bearer" else "")
    )
    if not given:
        raise PermissionDeniedError("Permission denied")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise UnauthenticatedError("ACL not found")
