"""The routes of /ui: the page's files, the mesh as server-sent events, and explanations."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from kvmesh.discovery.base import ROUTER, Registry
from kvmesh.errors import InvalidRequestError, MeshError, OverloadedError
from kvmesh.event_log import event_logger
from kvmesh.rpc.channels import ChannelPool
from kvmesh.rpc.router.explanations import find_explanation, request_id_in
from services.frontend.access.access import Access
from services.frontend.api.http.boundary import Boundary, error_response
from services.frontend.api.http.exchange import json_response
from services.frontend.settings import HttpSettings, UiSettings
from services.frontend.ui.encode import explanation_json
from services.frontend.ui.files import INDEX, StaticFile, static_files
from services.frontend.ui.observer import MeshObserver
from services.frontend.ui.viewer import HEADERS, check_address, check_operator, check_origin, is_served

_log = event_logger(__name__)
REQUEST_ID_CHARACTERS_MAX = 160
STALLED_VIEWER_TIMEOUT_S = 10.0
"""Longest wait for a viewer to read; then it is disconnected, which makes room for another. The page connects again."""
EXPLANATIONS_MAX = 4
"""Explanations that are fetched at the same time; more are refused with Retry-After. A viewer asks for one at a time."""
CALL_TIMEOUT_S = 2.0
"""Longest wait for a router; short, because a viewer waits for the answer."""
Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UiRoutes:
    """Adds the routes. Without `is_served` it adds none."""

    def __init__(
        self,
        observer: MeshObserver,
        *,
        access: Access,
        registry: Registry,
        channels: ChannelPool,
        ui: UiSettings,
        http: HttpSettings,
    ) -> None:
        self._observer = observer
        self._access = access
        self._registry = registry
        self._channels = channels
        self._ui = ui
        self._http = http
        self._explaining = 0

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See `AddRoutes`. The boundary's headers are not used: they let pages of other origins read answers."""
        if not is_served(self._ui, self._http):
            return
        if self._ui.allows_public and not self._access.needs_key:
            _log.warning("ui_needs_no_key", host=self._http.host, advice="--access-keys-file")
        for name, file in static_files().items():
            path = "/ui" if name == INDEX else f"/ui/{name}"
            app.router.add_get(path, partial(self._guarded, partial(_serve_file, file)))
        app.router.add_get("/ui/", _redirect)
        app.router.add_get("/ui/events", partial(self._guarded, self._events))
        app.router.add_get("/ui/explain/{id}", partial(self._guarded, self._explain))

    async def _guarded(self, serve: Serve, request: web.Request) -> web.StreamResponse:
        try:
            check_address(request, self._ui)
            return await serve(request)
        except MeshError as error:
            return error_response(error, headers={**HEADERS, "Cache-Control": "no-store"})

    def _check(self, request: web.Request) -> None:
        check_origin(request)
        check_operator(request, self._access)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Streams readings of the mesh, until the viewer leaves, is too slow, or its key is revoked."""
        self._check(request)
        with self._observer.viewing():
            # Before the head, so that a failure of the first reading still has a status.
            frame = await self._observer.next(0)
            response = web.StreamResponse(headers={**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
            response.content_type = "text/event-stream"
            try:
                await response.prepare(request)
                while True:
                    async with asyncio.timeout(STALLED_VIEWER_TIMEOUT_S):
                        await response.write(frame.event)
                    frame = await self._observer.next(frame.number)
                    check_operator(request, self._access)
            except TimeoutError:
                _log.info("ui_viewer_stalled")
                if request.transport is not None:
                    request.transport.abort()
            except (MeshError, ConnectionError):
                # The end of the stream says it all: the page connects again and gets the reason.
                pass
        return response

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        request_id = request_id_in(request.match_info["id"])
        if len(request_id) > REQUEST_ID_CHARACTERS_MAX or not request_id.isprintable():
            raise InvalidRequestError("this is not the id of a request", field="id")
        if self._explaining >= EXPLANATIONS_MAX:
            raise OverloadedError(
                "too many explanations are being fetched", reason="explanations_full", retry_after_s=1.0
            )
        self._explaining += 1
        try:
            routers = (await self._registry.instances(ROUTER)).instances
            found, router_id = await find_explanation(routers, self._channels, request_id, timeout_s=CALL_TIMEOUT_S)
        finally:
            self._explaining -= 1
        body = explanation_json(found, router_id)
        return json_response(body, headers={**HEADERS, "Cache-Control": "no-store"})


async def _redirect(_: web.Request) -> web.StreamResponse:
    """Redirects to the page. Its links are relative to the parent of /ui, so that a proxy may serve it under a prefix."""
    return web.Response(status=308, headers={**HEADERS, "Location": "../ui"})


async def _serve_file(file: StaticFile, request: web.Request) -> web.StreamResponse:
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": f'"{file.etag}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)
