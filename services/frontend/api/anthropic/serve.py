"""POST /v1/messages and /v1/messages/count_tokens."""

import re

from aiohttp import web

from kvmesh.errors import InvalidRequestError
from services.frontend.api.answer_blocks import BlockOutlet, pieces_for
from services.frontend.api.answer_reader import Reading
from services.frontend.api.anthropic.body import (
    MESSAGES_PATH,
    VERSION_HEADER,
    block_body,
    error_body,
    message_body,
)
from services.frontend.api.anthropic.events import MessageEvents, MessageStream
from services.frontend.api.anthropic.read import AskedMessage, read_message
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange, json_response
from services.frontend.api.http.steering import steer
from services.frontend.api.http.streaming import stream_answer
from services.frontend.api.run import reading_for, run_all
from services.frontend.pipeline.prepare import Prepared, tokens_of

COUNT_PATH = MESSAGES_PATH + "/count_tokens"
MAX_TOKENS_HEADER = "X-Kvmesh-Max-Tokens"
"""The limit that applied, where the model's context leaves less than `max_tokens`."""
_VERSION = re.compile(r"20\d\d-[01]\d-[0-3]\d\Z")


class Messages:
    """The API."""

    def add_routes(self, app: web.Application, boundary: Boundary) -> None:
        """See Extension."""
        app.router.add_post(MESSAGES_PATH, boundary.handler(_serve_message, error_body=error_body))
        app.router.add_post(COUNT_PATH, boundary.handler(_serve_count, error_body=error_body))


async def _read(exchange: Exchange, *, counts_only: bool) -> AskedMessage:
    # Anthropic's clients read the request's id from this header.
    exchange.headers["request-id"] = exchange.request_id
    # No version has changed the bodies so far, so any date is accepted.
    version = exchange.request.headers.get(VERSION_HEADER)
    if version is not None and not _VERSION.match(version):
        raise InvalidRequestError(
            f"{VERSION_HEADER} must be a date such as 2023-06-01", field=VERSION_HEADER, reason="invalid_value"
        )
    asked = await exchange.read_request(
        lambda values: read_message(values, exchange.request_id, counts_only=counts_only)
    )
    exchange.warn(*asked.warnings)
    return asked


async def _serve_message(exchange: Exchange) -> web.StreamResponse:
    asked = await _read(exchange, counts_only=False)
    pipeline, request = exchange.pipeline, asked.request
    inner = steer(request.requests[0], exchange.request.headers, exchange.settings)
    prepared = await pipeline.prepare(inner, began_s=exchange.began_s)
    exchange.model_name = prepared.model.name
    limit = prepared.generation.sampling.max_tokens
    if limit != inner.sampling.max_tokens:
        exchange.headers[MAX_TOKENS_HEADER] = str(limit)
    reading = reading_for(request, [prepared])
    pieces = pieces_for(reading)
    if request.is_stream:
        events = MessageEvents(inner.request_id, request.model, pieces, prepared.ask.prompt_tokens)
        return await stream_answer(exchange, [prepared], events, 1, stream_type=MessageStream, reading=reading)
    return await _whole(exchange, asked, prepared, BlockOutlet(pieces), reading)


async def _whole(
    exchange: Exchange, asked: AskedMessage, prepared: Prepared, outlet: BlockOutlet, reading: Reading | None
) -> web.StreamResponse:
    await run_all(exchange, [prepared], outlet, reading)
    exchange.warn(*(reading.warnings if reading is not None else ()))
    content = [block_body(block) for block in outlet.blocks]
    body = message_body(prepared.request.request_id, asked.request.model, content, outlet.ending, exchange.usage)
    return json_response(body, headers=exchange.headers)


async def _serve_count(exchange: Exchange) -> web.StreamResponse:
    asked = await _read(exchange, counts_only=True)
    pipeline = exchange.pipeline
    request = asked.request.requests[0]
    pipeline.access.check(request)
    model = pipeline.models.find(request.model)
    exchange.model_name = model.name
    token_ids = await tokens_of(request, model, pipeline.settings)
    return json_response({"input_tokens": len(token_ids)}, headers=exchange.headers)
