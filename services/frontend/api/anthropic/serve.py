"""POST /v1/messages and /v1/messages/count_tokens."""

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvmesh.errors import InvalidRequestError
from services.frontend.api.anthropic.body import block_body, error_body, message_body
from services.frontend.api.anthropic.events import MessageEvents, MessageStream
from services.frontend.api.anthropic.read import AskedMessage, read_message
from services.frontend.api.blocks import BlockOutlet, pieces_for
from services.frontend.api.http.boundary import Boundary, json_response
from services.frontend.api.http.steering import steer
from services.frontend.api.openai.bodies import sum_usage
from services.frontend.api.openai.serve import WARNING_HEADER, Exchange, read_of, run_all, stream_answer
from services.frontend.api.reading import Reading
from services.frontend.pipeline.prepare import Prepared, tokens_of

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
VERSION_HEADER = "anthropic-version"
_VERSION = re.compile(r"20\d\d-[01]\d-[0-3]\d\Z")


class Messages:
    """The API."""

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See Extension."""
        app.router.add_post(PATH, _handler(boundary, _create))
        app.router.add_post(COUNT_PATH, _handler(boundary, _count))


def _handler(
    boundary: Boundary, serve: Callable[[Exchange, AskedMessage], Awaitable[web.StreamResponse]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def work(exchange: Exchange) -> web.StreamResponse:
        # Where Anthropic's clients look for the id.
        exchange.headers["request-id"] = exchange.request_id
        # The bodies did not change with it so far; what it must be is a date.
        version = exchange.request.headers.get(VERSION_HEADER)
        if version is not None and not _VERSION.match(version):
            raise InvalidRequestError(
                f"{VERSION_HEADER} must be a date such as 2023-06-01", field=VERSION_HEADER, reason="invalid_value"
            )
        values = await boundary.object(exchange.request)
        asked = read_message(values, exchange.request_id, counts_only=serve is _count)
        if asked.warnings:
            exchange.headers[WARNING_HEADER] = ", ".join(asked.warnings)
        return await serve(exchange, asked)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await boundary.handle(request, work, error_body=error_body)

    return handle


async def _create(exchange: Exchange, asked: AskedMessage) -> web.StreamResponse:
    pipeline, request = exchange.pipeline, asked.request
    inner = steer(request.requests[0], exchange.request.headers, exchange.settings)
    prepared = await pipeline.prepare(inner, began_s=exchange.began_s)
    exchange.model_name = prepared.model.name
    reading = read_of(request, [prepared])
    pieces = pieces_for(reading)
    if request.is_stream:
        events = MessageEvents(inner.request_id, request.model, pieces, prepared.ask.prompt_tokens)
        return await stream_answer(exchange, [prepared], events, 1, stream_type=MessageStream, reading=reading)
    return await _whole(exchange, asked, prepared, BlockOutlet(pieces), reading)


async def _whole(
    exchange: Exchange, asked: AskedMessage, prepared: Prepared, outlet: BlockOutlet, reading: Reading | None
) -> web.StreamResponse:
    answers = await run_all(exchange, [prepared], outlet)
    exchange.usage = sum_usage([answer.usage for answer in answers])
    if reading is not None:
        exchange.usage = reading.counted(exchange.usage)
    if reading is not None and reading.warnings:
        told = [exchange.headers[WARNING_HEADER]] if WARNING_HEADER in exchange.headers else []
        exchange.headers[WARNING_HEADER] = ", ".join([*told, *reading.warnings])
    content = [block_body(block) for block in outlet.blocks]
    body = message_body(prepared.request.request_id, asked.request.model, content, outlet.ending, exchange.usage)
    return json_response(body, headers=exchange.headers)


async def _count(exchange: Exchange, asked: AskedMessage) -> web.StreamResponse:
    pipeline = exchange.pipeline
    request = asked.request.requests[0]
    pipeline.access.check(request)
    model = pipeline.models.find(request.model)
    exchange.model_name = model.name
    token_ids = await tokens_of(request, model, pipeline.settings)
    return json_response({"input_tokens": len(token_ids)}, headers=exchange.headers)
