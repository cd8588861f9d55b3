"""How the agent answers: JSON, blocking queries with index headers, errors as statuses, the token check."""

import asyncio
import hmac
import json
import random
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvmesh.discovery.agent import requests
from kvmesh.discovery.agent.live import LiveState
from kvmesh.discovery.limits import VALUE_BYTES_MAX
from kvmesh.errors import (
    InvalidRequestError,
    MeshError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

# Consul answers 500 for some unknown objects and 404 for others; its later versions answer 404 everywhere, as this agent does.
_STATUSES: tuple[tuple[type[MeshError], int], ...] = (
    (InvalidRequestError, 400),
    (UnauthenticatedError, 403),
    (PermissionDeniedError, 403),
    (NotFoundError, 404),
    (OverloadedError, 429),
)


class BlockingQueries:
    """Answers reads, which wait for a change if the client asks for that. At most `waiting_max` wait at the same time."""

    def __init__(self, live: LiveState, generator: random.Random, *, waiting_max: int) -> None:
        self._live = live
        self._waiting_max = waiting_max
        self._generator = generator
        self.waiting = 0

    async def read(
        self, request: web.Request, index_of: Callable[[], int], body_of: Callable[[], object]
    ) -> web.Response:
        """Answers with `body_of()`. With `index` in the query, waits until `index_of()` differs from it or the wait ends.

        An index from an earlier run of the agent differs, so its client gets an answer immediately.
        """
        if "filter" in request.query:
            raise InvalidRequestError("filter expressions are not supported by the embedded agent", field="filter")
        index = requests.number(request.query.get("index", "0"), field="index")
        wait_s = requests.wait_s(request.query.get("wait"))
        if index > 0 and index_of() == index:
            await self._wait(index, index_of, wait_s)
        return json_response(request, body_of(), index=index_of())

    async def _wait(self, index: int, index_of: Callable[[], int], wait_s: float) -> None:
        if self.waiting >= self._waiting_max:
            raise OverloadedError(f"{self.waiting} blocking queries are already waiting", reason="watchers_max")
        self.waiting += 1
        try:
            # Consul's jitter: clients with the same wait do not return together.
            async with asyncio.timeout(wait_s * (1.0 + self._generator.random() / 16)):
                while index_of() == index and not self._live.is_closing:
                    await self._live.wait_change()
        except TimeoutError:
            return
        finally:
            self.waiting -= 1


def json_response(request: web.Request, body: object, *, index: int = 0) -> web.Response:
    """Returns a JSON response, indented when the query has `pretty`."""
    text = json.dumps(body, indent=4 if "pretty" in request.query else None)
    return web.Response(text=text + "\n", content_type="application/json", headers=index_headers(index))


def index_headers(index: int) -> dict[str, str]:
    """Returns the headers of an answer that supports blocking queries; none for index 0."""
    if index <= 0:
        return {}
    return {"X-Consul-Index": str(index), "X-Consul-KnownLeader": "true", "X-Consul-LastContact": "0"}


def error_middleware(token: str) -> Middleware:
    """Checks the token, if one is set, and turns MeshErrors into HTTP statuses."""

    @web.middleware
    async def translate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            _check_token(request, token)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return web.Response(status=413, text=f"Request body too large, max size: {VALUE_BYTES_MAX} bytes.")
        except MeshError as error:
            status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
            return web.Response(status=status, text=error.message)

    return translate


def _check_token(request: web.Request, token: str) -> None:
    if not token:
        return
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = (
        request.headers.get("X-Consul-Token") or request.query.get("token") or (bearer if scheme == "Bearer" else "")
    )
    if not given:
        raise PermissionDeniedError("Permission denied")
    # aiohttp decodes header bytes that are not UTF-8 as surrogates.
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        raise UnauthenticatedError("ACL not found")
