"""/v1/batches: create, list, get, cancel."""

import re
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta

from kvmesh.errors import UnsupportedError
from services.frontend.api.batches.line_runner import ENDPOINTS
from services.frontend.api.batches.service import WINDOW_S_MAX, BatchService
from services.frontend.api.batches.upload import check_ttl
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.request_body import Body, invalid_value, read_body
from services.frontend.api.responses.pages import list_body, read_limit, refuse_unknown_parameters
from services.frontend.api.responses.read import StoredMetadata
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import batch_body

PATH = "/v1/batches"
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class OutputExpiry(Body, kw_only=True):
    """`output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(extra_json_schema={"minimum": 3600, "maximum": 30 * 86_400})]


class BatchRequest(Body, kw_only=True):
    """The body."""

    input_file_id: Annotated[str, Meta(max_length=256, extra_json_schema={"pattern": "^file-[0-9a-f]{32}$"})]
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": list(ENDPOINTS)})]
    completion_window: Annotated[
        str,
        Meta(
            max_length=32,
            description="OpenAI's 24h, or another time up to the server's limit.",
            extra_json_schema={"pattern": "^[1-9][0-9]{0,6}[smhd]$"},
        ),
    ]
    metadata: StoredMetadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchRoutes:
    """The batches API."""

    def __init__(self, service: BatchService, settings: BatchSettings) -> None:
        self._service = service
        self._settings = settings

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        app.router.add_post(PATH, boundary.handler(self._create))
        app.router.add_get(PATH, boundary.handler(self._list))
        app.router.add_get(PATH + "/{id}", boundary.handler(self._get))
        app.router.add_post(PATH + "/{id}/cancel", boundary.handler(self._cancel))

    async def _create(self, exchange: Exchange) -> web.StreamResponse:
        body = await exchange.read_request(lambda values: read_body(BatchRequest, values), is_strict=True)
        if body.endpoint not in ENDPOINTS:
            message = f"endpoint can be {', '.join(ENDPOINTS)}, not {body.endpoint[:64]!r}"
            raise UnsupportedError(message, field="endpoint")
        window_s, expiry = self._window_s(body.completion_window), body.output_expires_after
        output_ttl_s = None
        if expiry is not None:
            output_ttl_s = check_ttl(expiry.seconds, self._settings, "output_expires_after.seconds")
        row = await self._service.create(
            exchange.owner,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            window_s=window_s,
            metadata=body.metadata,
            output_ttl_s=output_ttl_s,
        )
        return exchange.json_response(batch_body(row))

    def _window_s(self, window: str) -> float:
        match = _WINDOW.match(window)
        window_s = float(int(match[1]) * _UNIT_S[match[2]]) if match else 0.0
        if not 0 < window_s <= WINDOW_S_MAX:
            raise invalid_value("completion_window", wanted=f"a time such as 24h, at most {WINDOW_S_MAX} seconds")
        return window_s

    async def _list(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.request.query
        refuse_unknown_parameters(query, ("limit", "after"))
        rows, has_more = await self._service.store.page(
            exchange.owner, limit=read_limit(query), after=query.get("after"), endpoints=ENDPOINTS
        )
        return exchange.json_response(list_body([batch_body(row) for row in rows], has_more=has_more))

    async def _get(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._service.get(exchange.owner, exchange.request.match_info["id"], ENDPOINTS)
        return exchange.json_response(batch_body(row))

    async def _cancel(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._service.get(exchange.owner, exchange.request.match_info["id"], ENDPOINTS)
        row = await self._service.cancel(exchange.owner, batch_id=row["id"])
        return exchange.json_response(batch_body(row))
