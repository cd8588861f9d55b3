"""POST, GET and cancel of batches."""

import re
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.batches.file_routes import is_file_id, refuse_unknown
from services.frontend.api.batches.line_runner import ENDPOINTS
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.batches.upload import check_ttl
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange, json_response
from services.frontend.api.request_body import Body, read_body, wrong
from services.frontend.api.responses.pages import list_body, read_limit
from services.frontend.api.responses.read import StoredMetadata
from services.frontend.stores.batch_rows import INPUT_PURPOSE, batch_body
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.files import FileStore

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

    def __init__(self, store: BatchStore, files: FileStore, runner: BatchRunner, settings: BatchSettings) -> None:
        self._store = store
        self._files = files
        self._runner = runner
        self._settings = settings

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See Extension."""
        app.router.add_post(PATH, boundary.handler(self._create))
        app.router.add_get(PATH, boundary.handler(self._list))
        app.router.add_get(PATH + "/{id}", boundary.handler(self._get))
        app.router.add_post(PATH + "/{id}/cancel", boundary.handler(self._cancel))

    async def _create(self, exchange: Exchange) -> web.StreamResponse:
        owner = exchange.owner
        body = read_body(BatchRequest, await exchange.read_object(adds_model=False))
        file_id = body.input_file_id
        if not is_file_id(file_id):
            raise wrong("input_file_id", "the id of a file")
        if body.endpoint not in ENDPOINTS:
            message = f"endpoint can be {', '.join(ENDPOINTS)}, not {body.endpoint[:64]!r}"
            raise UnsupportedError(message, field="endpoint")
        window_s, ttl = self._window_s(body.completion_window), body.output_expires_after
        output_ttl_s = None
        if ttl is not None:
            output_ttl_s = check_ttl(ttl.seconds, self._settings, "output_expires_after.seconds")
        file = await self._files.get(owner, file_id, field="input_file_id")
        if file["purpose"] != INPUT_PURPOSE:
            raise InvalidRequestError(
                f"the file's purpose is {file['purpose']}, not {INPUT_PURPOSE}",
                field="input_file_id",
                reason="invalid_value",
            )
        row = await self._store.create(
            owner,
            f"batch_{exchange.request_id}",
            endpoint=body.endpoint,
            input_file_id=file_id,
            completion_window=body.completion_window,
            window_s=window_s,
            metadata=body.metadata,
            output_ttl_s=output_ttl_s,
        )
        self._runner.wake()
        return json_response(batch_body(row), headers=exchange.headers)

    def _window_s(self, window: str) -> float:
        match = _WINDOW.match(window)
        window_s = float(int(match[1]) * _UNIT_S[match[2]]) if match else 0.0
        if not 0 < window_s <= self._settings.window_s_max:
            raise wrong("completion_window", f"a time such as 24h, at most {self._settings.window_s_max:g} seconds")
        return window_s

    async def _list(self, exchange: Exchange) -> web.StreamResponse:
        refuse_unknown(exchange.request, ("limit", "after"))
        query = exchange.request.query
        rows, has_more = await self._store.page(exchange.owner, limit=read_limit(query), after=query.get("after"))
        return json_response(list_body([batch_body(row) for row in rows], has_more=has_more), headers=exchange.headers)

    async def _get(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._store.get(exchange.owner, exchange.request.match_info["id"])
        return json_response(batch_body(row), headers=exchange.headers)

    async def _cancel(self, exchange: Exchange) -> web.StreamResponse:
        batch_id = exchange.request.match_info["id"]
        row = await self._store.cancel(exchange.owner, batch_id)
        self._runner.wake(batch_id)
        return json_response(batch_body(row), headers=exchange.headers)
