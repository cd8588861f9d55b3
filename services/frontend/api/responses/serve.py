"""POST, GET and DELETE of responses."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError, NotFoundError, UnavailableError, UnsupportedError
from kvmesh.event_log import event_logger
from services.frontend.api.answer_blocks import AnswerCollector
from services.frontend.api.answer_reader import AnswerReader, make_reader
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.steering import steer
from services.frontend.api.http.stream import EventStream
from services.frontend.api.http.streaming import stream_answer
from services.frontend.api.openai.logprobs import chat_entries
from services.frontend.api.responses.body import COMPLETED, begun_body, ended_body, item_body, status_of
from services.frontend.api.responses.events import ResponseEvents
from services.frontend.api.responses.pages import numbered_items, page_of
from services.frontend.api.responses.read import ParsedResponse, is_response_id, read_response, to_request
from services.frontend.api.run import RequestContext, run_all
from services.frontend.pipeline.prepare import Prepared, check_request
from services.frontend.pipeline.request import Request
from services.frontend.settings import ResponsesSettings
from services.frontend.stores.database import Database, StoreClock
from services.frontend.stores.responses import MIGRATIONS, ResponseStore
from services.frontend.stores.sqlite import SqliteDatabase

_log = event_logger(__name__)
PATH = "/v1/responses"
BUSY_TIMEOUT_S = 5.0
"""Longest wait for another process that writes to the database."""
SWEEP_S = 60.0
"""Pause between two deletions of expired and surplus responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse:
    """A request that is ready to run. `begun`: the response object before its output."""

    parsed: ParsedResponse
    prepared: Prepared
    reader: AnswerReader
    begun: Mapping[str, Any]


class Responses:
    """The API. A running part: it owns the store and deletes what is too old. `directory`: of the store, by default.

    `shared`: the database that frontends on several machines share, instead of a file.
    """

    def __init__(
        self, settings: ResponsesSettings, directory: Path, clock: Clock, *, shared: Database | None = None
    ) -> None:
        path = Path(settings.path).expanduser() if settings.path else directory / "responses.sqlite"
        self._database = shared or SqliteDatabase(path, MIGRATIONS, busy_timeout_s=BUSY_TIMEOUT_S)
        store = ResponseStore(self._database, settings, StoreClock(clock, self._database))
        self._store = store if settings.is_on else None
        self._settings = settings
        self._is_optional = not settings.path and shared is None

    async def start(self) -> None:
        """Opens the store. If its path is the default and it cannot be opened, nothing is stored."""
        if self._store is None:
            return
        try:
            await self._database.open()
        except UnavailableError as error:
            if not self._is_optional:
                raise
            _log.warning("response_store_off", detail=error.message)
            self._store = None

    async def run(self) -> None:
        """Deletes responses beyond the limits of age and size, until cancelled."""
        while self._store is not None:
            await asyncio.sleep(SWEEP_S)
            # A file that is busy or fails is swept later; until then, requests that need it are refused.
            with suppress(UnavailableError):
                if count := await self._store.sweep():
                    _log.info("responses_deleted", count=count)

    async def aclose(self) -> None:
        if self._store is not None:
            await self._database.aclose()

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        app.router.add_post(PATH, boundary.handler(self._create))
        app.router.add_post(PATH + "/input_tokens", boundary.handler(self._count))
        app.router.add_get(PATH + "/{id}", boundary.handler(self._get))
        app.router.add_delete(PATH + "/{id}", boundary.handler(self._delete))
        app.router.add_get(PATH + "/{id}/input_items", boundary.handler(self._input_items))
        app.router.add_post(PATH + "/{id}/cancel", boundary.handler(self._cancel))

    async def _create(self, exchange: Exchange) -> web.StreamResponse:
        response = await self.prepare(exchange, await exchange.read_request(self.parse))
        if not response.parsed.is_stream:
            return exchange.json_response(await self.answer(exchange, response))
        prepared, reader, parsed = response.prepared, response.reader, response.parsed
        events = ResponseEvents(
            begun=response.begun,
            request_id=exchange.request_id,
            reader=reader,
            text=prepared.model.text,
            includes_logprobs=parsed.includes_logprobs,
        )

        async def run(stream: EventStream) -> None:
            await run_all(exchange, [prepared], stream, reader=reader)
            # A client that has seen the last event can continue the response.
            final = events.complete(exchange.usage, int(exchange.pipeline.clock.wall()))
            await self._store_answer(exchange, parsed, final)

        return await stream_answer(
            exchange, [prepared], events, run=run, choices=1, is_detailed=parsed.includes_logprobs
        )

    async def _count(self, exchange: Exchange) -> web.StreamResponse:
        request = await self._to_request(exchange, await exchange.read_request(self.parse))
        model = exchange.find_model(request.model)
        check_request(request, model, exchange.pipeline.settings)
        token_ids = await exchange.tokenise(request)
        return exchange.json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    def parse(self, values: Mapping[str, Any]) -> ParsedResponse:
        """Checks a body."""
        has_store, stores_by_default = self._store is not None, self._settings.stores_by_default
        return read_response(values, stores_by_default=stores_by_default, has_store=has_store)

    async def prepare(
        self, context: RequestContext, parsed: ParsedResponse, *, priority: int | None = None
    ) -> "PreparedResponse":
        """Loads the conversation that a response continues, and prepares it. `priority` overrides the request's own."""
        request = await self._to_request(context, parsed)
        if priority is not None:
            request = replace(request, priority=priority)
        if isinstance(context, Exchange):
            request = steer(request, context)
        prepared = await context.prepare(request)
        return PreparedResponse(
            parsed=parsed,
            prepared=prepared,
            reader=make_reader(prepared, choices=1),
            begun=begun_body(parsed, context.request_id, int(context.pipeline.clock.wall())),
        )

    async def _to_request(self, context: RequestContext, parsed: ParsedResponse) -> Request:
        earlier: Sequence[Mapping[str, Any]] = ()
        previous = parsed.body.previous_response_id
        if previous is not None:
            if self._store is None:
                raise UnsupportedError("this frontend stores no responses", field="previous_response_id")
            earlier = await self._store.conversation(owner=context.caller.tenant, response_id=previous)
        return to_request(parsed, earlier, context.request_id)

    async def answer(self, context: RequestContext, response: "PreparedResponse") -> dict[str, Any]:
        """Runs a request to its end and stores the answer if requested."""
        parsed, prepared, reader = response.parsed, response.prepared, response.reader
        collected = AnswerCollector(reader)
        await run_all(context, [prepared], collected, reader=reader)
        if isinstance(context, Exchange):
            context.warn(*reader.warnings)
        answer = collected.choices[0]
        logprobs = None
        if parsed.includes_logprobs:
            entries = chat_entries(prepared.model.text, answer.token_ids, answer.logprobs)
            logprobs = [orjson.loads(each) for each in entries]
        output, last = [], answer.blocks.all[-1]
        for block in answer.blocks.all:
            status = status_of(answer.ending) if block is last else COMPLETED
            output.append(item_body(context.request_id, block, status, logprobs=logprobs))
        completed_s = int(context.pipeline.clock.wall())
        body = ended_body(response.begun, output, answer.ending, usage=context.usage, completed_s=completed_s)
        await self._store_answer(context, parsed, body)
        return body

    async def _store_answer(self, context: RequestContext, parsed: ParsedResponse, body: Mapping[str, Any]) -> None:
        if parsed.stores and self._store is not None:
            await self._store.put(context.caller.tenant, body, items=numbered_items(parsed.items, body["id"]))

    async def _get(self, exchange: Exchange) -> web.StreamResponse:
        query = exchange.request.query
        if query.get("stream", "false").lower() not in ("false", "0", ""):
            raise UnsupportedError("stored responses are not streamed again", field="stream")
        for name in ("starting_after", "include_obfuscation"):
            if name in query:
                raise UnsupportedError(f"{name} is for streams, and stored responses are not streamed", field=name)
        store, response_id = self._stored(exchange.request)
        found = await store.get(owner=exchange.owner, response_id=response_id)
        return exchange.json_response(found.body)

    async def _delete(self, exchange: Exchange) -> web.StreamResponse:
        store, response_id = self._stored(exchange.request)
        await store.delete(owner=exchange.owner, response_id=response_id)
        return exchange.json_response({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, exchange: Exchange) -> web.StreamResponse:
        store, response_id = self._stored(exchange.request)
        found = await store.get(owner=exchange.owner, response_id=response_id)
        return exchange.json_response(page_of(found.items, exchange.request.query))

    async def _cancel(self, exchange: Exchange) -> web.StreamResponse:
        store, response_id = self._stored(exchange.request)
        await store.get(owner=exchange.owner, response_id=response_id)
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
