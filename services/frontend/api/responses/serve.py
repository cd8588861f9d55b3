"""POST, GET and DELETE of responses."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from kvmesh.core import Usage
from kvmesh.errors import InvalidRequestError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.telemetry import event_logger
from services.frontend.api.answer_blocks import BlockOutlet, pieces_for
from services.frontend.api.answer_reader import Reading
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange, json_response
from services.frontend.api.http.steering import steer
from services.frontend.api.http.streaming import stream_answer
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.logprobs import chat_entries
from services.frontend.api.responses.body import begun_body, ended_body, item_body, status_of
from services.frontend.api.responses.events import ResponseEvents, ResponseStream
from services.frontend.api.responses.pages import numbered_items, page_of
from services.frontend.api.responses.read import AskedResponse, is_response_id, read_asked, read_response
from services.frontend.api.responses.settings import ResponsesSettings
from services.frontend.api.run import RunContext, reading_for, run_all, warning_headers
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared
from services.frontend.stores.responses import ResponseStore

_log = event_logger(__name__)
PATH = "/v1/responses"


class Responses:
    """The API. A running part: it owns the store and sweeps it. `store` None: nothing is kept."""

    def __init__(self, store: ResponseStore | None, settings: ResponsesSettings) -> None:
        self._store = store
        self._settings = settings

    async def start(self) -> None:
        """Opens the store. Where it was not asked for by name and cannot be had, nothing is kept."""
        if self._store is None:
            return
        try:
            await self._store.open()
        except UnavailableError as error:
            if self._settings.path:
                raise
            _log.warning("response_store_off", why=error.message)
            self._store = None

    async def run(self) -> None:
        """Deletes what is too old or too much, until cancelled."""
        while self._store is not None:
            await asyncio.sleep(self._settings.sweep_s)
            # A file that is busy or fails now is swept later; requests that need it are refused meanwhile.
            with suppress(UnavailableError):
                if gone := await self._store.sweep():
                    _log.info("responses_deleted", count=gone)

    async def aclose(self) -> None:
        """Closes the store."""
        if self._store is not None:
            await self._store.aclose()

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See Extension."""
        app.router.add_post(PATH, boundary.handler(self._create))
        app.router.add_get(PATH + "/{id}", boundary.handler(self._get))
        app.router.add_delete(PATH + "/{id}", boundary.handler(self._delete))
        app.router.add_get(PATH + "/{id}/input_items", boundary.handler(self._input_items))
        app.router.add_post(PATH + "/{id}/cancel", boundary.handler(self._cancel))

    async def _create(self, exchange: Exchange) -> web.StreamResponse:
        body = await exchange.read_object()
        owner = exchange.owner
        asked, prepared, request = await self.prepare(exchange.pipeline, body, exchange.request_id, owner, exchange)
        exchange.model_name = prepared.model.name
        if not asked.is_stream:
            answer = await self.answer(exchange, asked, prepared, request, owner)
            return json_response(answer, headers=exchange.headers)
        reading = reading_for(request, [prepared])
        events = _events(asked, prepared, reading, int(exchange.pipeline.clock.wall()))

        async def on_answered(usage: Usage) -> None:
            final = events.finish(usage, int(exchange.pipeline.clock.wall()))
            await self._keep(asked, owner, final)

        return await stream_answer(
            exchange, [prepared], events, 1, stream_type=ResponseStream, reading=reading, on_answered=on_answered,
            is_detailed=asked.includes_logprobs,
        )  # fmt: skip

    async def prepare(
        self,
        pipeline: Pipeline,
        body: Mapping[str, Any],
        request_id: str,
        owner: str,
        context: RunContext,
        *,
        priority: int | None = None,
    ) -> tuple[AskedResponse, Prepared, Asked]:
        """Reads and checks a body and everything that it continues. `priority` overrides the request's own."""
        settings = self._settings
        asked = read_response(body, stores_by_default=settings.stores_by_default, has_store=self._store is not None)
        earlier: Sequence[Mapping[str, Any]] = ()
        previous = asked.body.previous_response_id
        if previous is not None:
            if self._store is None:
                raise UnsupportedError("this frontend keeps no responses", field="previous_response_id")
            earlier = await self._store.conversation(owner, previous)
        request = read_asked(asked, earlier, request_id)
        inner = request.requests[0]
        if priority is not None:
            inner = replace(inner, priority=priority)
        if isinstance(context, Exchange):
            inner = steer(inner, context.request.headers, context.settings)
        return asked, await pipeline.prepare(inner, began_s=context.began_s), request

    async def answer(
        self, context: RunContext, asked: AskedResponse, prepared: Prepared, request: Asked, owner: str
    ) -> dict[str, Any]:
        """Runs a request to its end and stores what came, if that is wanted."""
        clock = context.pipeline.clock
        begun = begun_body(asked, prepared.request.request_id, int(clock.wall()))
        reading = reading_for(request, [prepared])
        outlet = BlockOutlet(pieces_for(reading))
        await run_all(context, [prepared], outlet, reading)
        if isinstance(context, Exchange):
            context.headers.update(warning_headers(reading))
        body = _whole(asked, prepared, outlet, begun, context.usage, int(clock.wall()))
        await self._keep(asked, owner, body)
        return body

    async def _keep(self, asked: AskedResponse, owner: str, body: Mapping[str, Any]) -> None:
        if asked.stores and self._store is not None:
            await self._store.put(owner, body, numbered_items(asked.items, body["id"]))

    async def _get(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.request.query
        if query.get("stream", "false").lower() not in ("false", "0", ""):
            raise UnsupportedError("stored responses are not streamed again", field="stream")
        for name in ("starting_after", "include_obfuscation"):
            if name in query:
                raise UnsupportedError(f"{name} is for streams, and stored responses are not streamed", field=name)
        store, response_id = self._stored(exchange.request)
        found = await store.get(exchange.owner, response_id)
        return json_response(found.body, headers=exchange.headers)

    async def _delete(self, exchange: Exchange) -> web.StreamResponse:
        store, response_id = self._stored(exchange.request)
        await store.delete(exchange.owner, response_id)
        body = {"id": response_id, "object": "response", "deleted": True}
        return json_response(body, headers=exchange.headers)

    async def _input_items(self, exchange: Exchange) -> web.StreamResponse:
        store, response_id = self._stored(exchange.request)
        found = await store.get(exchange.owner, response_id)
        return json_response(page_of(found.items, exchange.request.query), headers=exchange.headers)

    async def _cancel(self, exchange: Exchange) -> web.StreamResponse:
        store, response_id = self._stored(exchange.request)
        await store.get(exchange.owner, response_id)
        raise InvalidRequestError(
            "only a response that runs in the background can be cancelled; to end another, close its connection",
            field="response_id",
            reason="not_in_background",
        )

    def _stored(self, request: web.Request) -> tuple[ResponseStore, str]:
        response_id = request.match_info["id"]
        if self._store is None or not is_response_id(response_id):
            raise NotFoundError(
                f"there is no stored response {response_id[:64]!r}", field="response_id", reason="response_not_found"
            )
        return self._store, response_id


def _events(asked: AskedResponse, prepared: Prepared, reading: Reading | None, created_s: int) -> ResponseEvents:
    request_id = prepared.request.request_id
    return ResponseEvents(
        begun_body(asked, request_id, created_s),
        request_id,
        pieces_for(reading),
        prepared.model.text,
        includes_logprobs=asked.includes_logprobs,
    )


def _whole(
    asked: AskedResponse,
    prepared: Prepared,
    outlet: BlockOutlet,
    begun: Mapping[str, Any],
    usage: Usage,
    completed_s: int,
) -> dict[str, Any]:
    request_id, ending = prepared.request.request_id, outlet.ending
    logprobs = None
    if asked.includes_logprobs:
        entries = chat_entries(prepared.model.text, outlet.token_ids, outlet.logprobs)
        logprobs = [orjson.loads(each) for each in entries]
    output, last = [], outlet.blocks[-1]
    for block in outlet.blocks:
        status = status_of(ending) if block is last else "completed"
        output.append(item_body(request_id, block, status, logprobs))
    return ended_body(begun, output, ending, usage, completed_s)
