"""/v1/messages/batches, on the batches of `api/batches/`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import orjson
from aiohttp import web
from msgspec import Meta

from kvmesh.rpc.codec.batch import BatchCall, BatchResult
from services.frontend.api.anthropic.body import MESSAGES_PATH, error_body
from services.frontend.api.batches.service import BatchService
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.request_body import Body, JsonObject, invalid_value, read_body
from services.frontend.api.responses.pages import read_limit, refuse_unknown_parameters
from services.frontend.settings import BatchSettings
from services.frontend.stores.batch_rows import CANCELLING, EXPIRED
from services.frontend.stores.database import Row

PATH = MESSAGES_PATH + "/batches"
_PAGE_MAX = 1000
_WINDOW_S = 86_400.0
_COUNT = "requests"
_NOT_RUN = 0
"""The status code of a request that was not run before its batch was cancelled or expired."""


class BatchedMessage(Body, kw_only=True):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$")]
    params: Annotated[JsonObject, Meta(description="The body of a request to /v1/messages. Checked when it is run.")]


class MessageBatchRequest(Body, kw_only=True):
    """The body."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=100_000)]


class MessageBatchRoutes:
    """Anthropic's batches API. It does not show batches of OpenAI's API, nor the reverse."""

    def __init__(self, service: BatchService, settings: BatchSettings) -> None:
        self._service = service
        self._settings = settings

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        handler = partial(boundary.handler, error_body=error_body)
        app.router.add_post(PATH, handler(self._create))
        app.router.add_get(PATH, handler(self._list))
        app.router.add_get(PATH + "/{id}", handler(self._get))
        app.router.add_delete(PATH + "/{id}", handler(self._delete))
        app.router.add_post(PATH + "/{id}/cancel", handler(self._cancel))
        app.router.add_get(PATH + "/{id}/results", handler(self._results))

    async def _create(self, exchange: Exchange) -> web.StreamResponse:
        body = await exchange.read_request(lambda values: read_body(MessageBatchRequest, values), is_strict=True)
        if len(body.requests) > self._settings.lines_max:
            raise invalid_value("requests", wanted=f"a list of at most {self._settings.lines_max} requests")
        if len({each.custom_id for each in body.requests}) < len(body.requests):
            raise invalid_value("requests", wanted="a list of requests with different custom_id")
        call = BatchCall(
            endpoint=MESSAGES_PATH,
            lines=[(each.custom_id, orjson.dumps(each.params).decode()) for each in body.requests],
            window_s=_WINDOW_S,
            # The row has the number of requests only after the runner has validated them.
            metadata={_COUNT: str(len(body.requests))},
        )
        row = await self._service.create_from_call(exchange.owner, call)
        return exchange.json_response(self._batch_body(exchange, row))

    async def _list(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.request.query
        refuse_unknown_parameters(query, ("limit", "after_id", "before_id"))
        limit, before_id = read_limit(query, limit_max=_PAGE_MAX), query.get("before_id")
        if before_id is not None and "after_id" in query:
            raise invalid_value("before_id", wanted="absent when there is after_id")
        rows, has_more = await self._service.store.page(
            exchange.owner,
            limit=limit,
            after=before_id or query.get("after_id"),
            endpoints=(MESSAGES_PATH,),
            newest_first=before_id is None,
        )
        ordered = list(rows) if before_id is None else list(reversed(rows))
        batches = [self._batch_body(exchange, row) for row in ordered]
        return exchange.json_response(
            {
                "data": batches,
                "has_more": has_more,
                "first_id": batches[0]["id"] if batches else None,
                "last_id": batches[-1]["id"] if batches else None,
            }
        )

    async def _get(self, exchange: Exchange) -> web.StreamResponse:
        return exchange.json_response(self._batch_body(exchange, await self._row(exchange)))

    async def _delete(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._row(exchange)
        await self._service.delete(exchange.owner, batch_id=row["id"])
        return exchange.json_response({"id": row["id"], "type": "message_batch_deleted"})

    async def _cancel(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._service.cancel(exchange.owner, batch_id=(await self._row(exchange))["id"])
        return exchange.json_response(self._batch_body(exchange, row))

    async def _results(self, exchange: Exchange) -> web.StreamResponse:
        row = await self._row(exchange)
        async with aclosing(self._service.results(exchange.owner, row["id"])) as results:
            # Reads the first result before it sends the response's head, so that a failure can have a status.
            first = await anext(results, None)
            response = web.StreamResponse(headers=exchange.headers)
            response.content_type = "application/x-jsonl"
            await response.prepare(exchange.request)
            async for result in _chained(first, results):
                line = {"custom_id": result.custom_id, "result": _result_body(result, row["status"])}
                await response.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        await response.write_eof()
        return response

    async def _row(self, exchange: Exchange) -> Row:
        return await self._service.get(exchange.owner, exchange.request.match_info["id"], (MESSAGES_PATH,))

    def _batch_body(self, exchange: Exchange, row: Row) -> dict[str, Any]:
        """Converts a row to Anthropic's batch object."""
        has_ended = row["ended_s"] is not None
        url = exchange.request.url.with_path(f"{PATH}/{row['id']}/results").with_query(None)
        status = "ended" if has_ended else "canceling" if row["status"] == CANCELLING else "in_progress"
        return {
            "id": row["id"],
            "type": "message_batch",
            "processing_status": status,
            "request_counts": _counts(row),
            "created_at": _time(row["created_s"]),
            "expires_at": _time(row["expires_s"]),
            "ended_at": _time(row["ended_s"]),
            "cancel_initiated_at": _time(row["cancelling_s"]),
            "archived_at": None,
            "results_url": str(url) if row["output_file_id"] or row["error_file_id"] else None,
        }


def _counts(row: Row) -> dict[str, int]:
    """Counts requests by result. All of them are `processing` until the batch has ended, as in Anthropic's API."""
    counts = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if row["ended_s"] is None:
        return counts | {"processing": int(orjson.loads(row["metadata"])[_COUNT])}
    counts |= {"succeeded": row["completed"], "errored": row["failed"] - row["unrun"]}
    return counts | {"expired" if row["status"] == EXPIRED else "canceled": row["unrun"]}


async def _chained(
    first: BatchResult | None, rest: AsyncGenerator[BatchResult, None]
) -> AsyncGenerator[BatchResult, None]:
    if first is not None:
        yield first
        async for each in rest:
            yield each


def _result_body(result: BatchResult, status: str) -> dict[str, Any]:
    if result.status_code == _NOT_RUN:
        return {"type": "expired" if status == EXPIRED else "canceled"}
    body = orjson.loads(result.body)
    if result.status_code == 200:
        return {"type": "succeeded", "message": body}
    return {"type": "errored", "error": body}


def _time(wall_s: float | None) -> str | None:
    return None if wall_s is None else datetime.fromtimestamp(wall_s, UTC).isoformat()
