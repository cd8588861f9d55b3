"""/v1/files: upload, list, get, delete."""

import asyncio
import re
from collections import Counter

from aiohttp import web

from kvmesh.errors import InvalidRequestError, MeshError, NotFoundError, OverloadedError
from services.frontend.api.batches.upload import read_upload
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.hosts import check_form_origin
from services.frontend.api.request_body import invalid_value
from services.frontend.api.responses.pages import list_body, read_limit, read_order, refuse_unknown_parameters
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import INPUT_PURPOSE, OUTPUT_PURPOSE, file_body
from services.frontend.stores.files import TENANT_SHARE, FileStore

PATH = "/v1/files"
LIST_MAX = 10_000
FILE_BYTES_PER_CHARGED = 1024
UPLOADS_MAX = 8
"""Uploads at a time; more are refused with Retry-After. Each writes a whole file before the store is asked for room."""
_ID = re.compile(r"file-[0-9a-f]{32}\Z")


class FileRoutes:
    """The files API."""

    def __init__(self, files: FileStore, settings: BatchSettings) -> None:
        self._files = files
        self._settings = settings
        self._uploads: Counter[str] = Counter()

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        app.router.add_post(PATH, boundary.handler(self._upload))
        app.router.add_get(PATH, boundary.handler(self._list))
        app.router.add_get(PATH + "/{id}", boundary.handler(self._get))
        app.router.add_delete(PATH + "/{id}", boundary.handler(self._delete))
        app.router.add_get(PATH + "/{id}/content", boundary.handler(self._content))

    async def _upload(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        if not request.content_type.startswith("multipart/form-data"):
            raise InvalidRequestError("the body must be multipart/form-data", reason="invalid_body")
        check_form_origin(request, exchange.settings)
        owner = exchange.owner
        is_full = self._uploads.total() >= UPLOADS_MAX
        if is_full or (owner and self._uploads[owner] >= UPLOADS_MAX * TENANT_SHARE):
            raise OverloadedError("too many uploads at once", reason="uploads_full", retry_after_s=1.0)
        file_id = f"file-{exchange.request_id}"
        file = self._files.new(file_id)
        self._uploads[owner] += 1
        try:
            form, ttl_s = await read_upload(
                request, file, self._settings, idle_timeout_s=exchange.settings.body_timeout_s
            )
            access = exchange.pipeline.access
            access.charge(exchange.caller, requests=1, tokens=file.size_bytes // FILE_BYTES_PER_CHARGED)
            row = await self._files.keep_and_add(file, owner=owner, name=form.name, purpose=form.purpose, ttl_s=ttl_s)
        finally:
            self._uploads[owner] -= 1
            self._uploads += Counter()  # Removes owners without uploads.
            await asyncio.shield(asyncio.to_thread(file.discard))
        return exchange.json_response(file_body(row))

    async def _list(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.request.query
        refuse_unknown_parameters(query, ("limit", "after", "order", "purpose"))
        purpose = query.get("purpose")
        if purpose not in (None, INPUT_PURPOSE, OUTPUT_PURPOSE):
            raise invalid_value("purpose", wanted=f"{INPUT_PURPOSE} or {OUTPUT_PURPOSE}")
        rows, has_more = await self._files.page(
            exchange.owner,
            limit=read_limit(query, default=LIST_MAX, limit_max=LIST_MAX),
            after=query.get("after"),
            purpose=purpose,
            newest_first=read_order(query),
        )
        return exchange.json_response(list_body([file_body(row) for row in rows], has_more=has_more))

    async def _get(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._files.get(owner=exchange.owner, file_id=file_id_of(exchange.request))
        return exchange.json_response(file_body(row))

    async def _delete(self, exchange: Exchange) -> web.StreamResponse:
        file_id = file_id_of(exchange.request)
        await self._files.delete(owner=exchange.owner, file_id=file_id)
        return exchange.json_response({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, exchange: Exchange) -> web.StreamResponse:
        file_id = file_id_of(exchange.request)
        row = await self._files.get(owner=exchange.owner, file_id=file_id)
        headers = {**exchange.headers, "Content-Type": "application/octet-stream"}
        if (path := self._files.path(file_id)) is not None:
            return web.FileResponse(path, headers=headers)
        parts = self._files.read(file_id)
        # Before the head of the response is sent, so that missing file contents or an unreachable store give an error with a body.
        try:
            first = await anext(parts)
        except FileNotFoundError:
            message = f"the bytes of file {file_id!r} are gone"
            raise NotFoundError(message, field="file_id", reason="file_not_found") from None
        response = web.StreamResponse(headers={**headers, "Content-Length": str(row["size_bytes"])})
        await response.prepare(exchange.request)
        await response.write(first)
        try:
            async for part in parts:
                await response.write(part)
        except (MeshError, FileNotFoundError):
            # The client sees fewer bytes than the length that it was promised.
            if exchange.request.transport is not None:
                exchange.request.transport.abort()
            raise
        await response.write_eof()
        return response


def file_id_of(request: web.Request) -> str:
    """Returns the id in the path. Raises NotFoundError if it is malformed, since it becomes part of a file name."""
    file_id = request.match_info["id"]
    if not is_file_id(file_id):
        raise NotFoundError(f"there is no file {file_id[:64]!r}", field="file_id", reason="file_not_found")
    return file_id


def is_file_id(text: str) -> bool:
    return _ID.match(text) is not None
