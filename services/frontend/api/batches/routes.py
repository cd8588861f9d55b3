"""POST, GET and cancel of batches."""

import re

from aiohttp import web

from kvmesh.errors import InvalidRequestError, UnsupportedError
from services.frontend.api.batches.answer import ENDPOINTS
from services.frontend.api.batches.file_routes import is_file_id, refuse_unknown
from services.frontend.api.batches.runner import BatchRunner
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.batches.upload import check_ttl
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange, json_response
from services.frontend.api.openai.fields import Fields
from services.frontend.api.responses.pages import list_body, read_limit
from services.frontend.api.responses.read import read_metadata
from services.frontend.stores.batch_rows import INPUT_PURPOSE, batch_body
from services.frontend.stores.batches import BatchStore
from services.frontend.stores.files import FileStore

PATH = "/v1/batches"
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])\Z")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


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
        fields = Fields(await exchange.read_object(adds_model=False))
        endpoint, file_id = self._read_endpoint(fields), fields.text("input_file_id", 256)
        if file_id is None or not is_file_id(file_id):
            raise fields.wrong("input_file_id", "the id of a file")
        window, window_s = self._read_window(fields)
        metadata, output_ttl_s = read_metadata(fields), self._read_output_ttl(fields)
        fields.finish()
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
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=window,
            window_s=window_s,
            metadata=metadata,
            output_ttl_s=output_ttl_s,
        )
        self._runner.wake()
        return json_response(batch_body(row), headers=exchange.headers)

    def _read_endpoint(self, fields: Fields) -> str:
        endpoint = fields.text("endpoint", 256)
        if not endpoint:
            raise fields.wrong("endpoint", "one of " + ", ".join(ENDPOINTS))
        if endpoint not in ENDPOINTS:
            raise UnsupportedError(f"endpoint can be {', '.join(ENDPOINTS)}, not {endpoint[:64]!r}", field="endpoint")
        return endpoint

    def _read_window(self, fields: Fields) -> tuple[str, float]:
        """OpenAI's only window is 24h; here it can be any number of seconds, minutes, hours or days."""
        window = fields.text("completion_window", 32)
        match = _WINDOW.match(window or "")
        window_s = float(int(match[1]) * _UNIT_S[match[2]]) if match else 0.0
        if not 0 < window_s <= self._settings.window_s_max:
            raise fields.wrong(
                "completion_window", f"a time such as 24h, at most {self._settings.window_s_max:g} seconds"
            )
        return str(window), window_s

    def _read_output_ttl(self, fields: Fields) -> float | None:
        value = fields.object("output_expires_after")
        if value is None:
            return None
        inner = Fields(value, "output_expires_after.")
        if inner.choice("anchor", ("created_at",)) is None:
            raise inner.wrong("anchor", "created_at")
        ttl_s = inner.integer("seconds")
        if ttl_s is None:
            raise inner.wrong("seconds", "an integer")
        inner.finish()
        return check_ttl(ttl_s, self._settings, "output_expires_after.seconds")

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
