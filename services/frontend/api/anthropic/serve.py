"""POST /v1/messages and /v1/messages/count_tokens."""

import re
from functools import partial
from typing import Any

from aiohttp import web

from services.frontend.api.answer_blocks import AnswerCollector
from services.frontend.api.answer_reader import AnswerReader, make_reader
from services.frontend.api.anthropic.body import (
    MESSAGES_PATH,
    VERSION_HEADER,
    block_body,
    error_body,
    message_body,
)
from services.frontend.api.anthropic.events import MessageEvents
from services.frontend.api.anthropic.read import BUDGET_WARNING, read_message
from services.frontend.api.http.boundary import Boundary
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.steering import steer
from services.frontend.api.http.streaming import stream_answer
from services.frontend.api.request_body import invalid_value
from services.frontend.api.run import ApiRequest, RequestContext, run_all
from services.frontend.pipeline.prepare import Prepared

MAX_TOKENS_HEADER = "X-Kvmesh-Max-Tokens"
"""The limit that applied, if the model's context leaves less than `max_tokens`."""
_VERSION = re.compile(r"20\d\d-[01]\d-[0-3]\d\Z")


def add_message_routes(app: web.Application, boundary: Boundary) -> None:
    app.router.add_post(MESSAGES_PATH, boundary.handler(_serve_message, error_body=error_body))
    app.router.add_post(MESSAGES_PATH + "/count_tokens", boundary.handler(_serve_count, error_body=error_body))


async def _read(exchange: Exchange, *, counts_only: bool) -> ApiRequest:
    # Anthropic's clients read the request's id from this header.
    exchange.headers["request-id"] = exchange.request_id
    # No version has changed the bodies so far, so any date is accepted.
    version = exchange.request.headers.get(VERSION_HEADER)
    if version is not None and not _VERSION.match(version):
        raise invalid_value(VERSION_HEADER, wanted="a date such as 2023-06-01")
    request, has_budget = await exchange.read_request(
        lambda values: read_message(values, exchange.request_id, counts_only=counts_only)
    )
    if has_budget:
        exchange.warn(BUDGET_WARNING)
    return request


async def _serve_message(exchange: Exchange) -> web.StreamResponse:
    request = await _read(exchange, counts_only=False)
    prepared = await exchange.prepare(steer(request.requests[0], exchange))
    limit = prepared.generation.sampling.max_tokens
    if limit != request.requests[0].sampling.max_tokens:
        exchange.headers[MAX_TOKENS_HEADER] = str(limit)
    reader = make_reader(prepared, choices=1)
    if request.is_stream:
        prompt_tokens = prepared.ask.prompt_tokens
        events = MessageEvents(
            request_id=exchange.request_id, model=request.model, reader=reader, prompt_tokens=prompt_tokens
        )
        run = partial(run_all, exchange, [prepared], reader=reader)
        return await stream_answer(exchange, [prepared], events, run=run, choices=1)
    body = await whole_message(exchange, request.model, prepared, reader=reader)
    exchange.warn(*reader.warnings)
    return exchange.json_response(body)


async def whole_message(
    context: RequestContext, model: str, prepared: Prepared, *, reader: AnswerReader
) -> dict[str, Any]:
    """Runs the request and returns the JSON body of its answer."""
    collected = AnswerCollector(reader)
    await run_all(context, [prepared], collected, reader=reader)
    answer = collected.choices[0]
    content = [block_body(block) for block in answer.blocks.all]
    return message_body(
        request_id=context.request_id, model=model, content=content, ending=answer.ending, usage=context.usage
    )


async def _serve_count(exchange: Exchange) -> web.StreamResponse:
    request = (await _read(exchange, counts_only=True)).requests[0]
    return exchange.json_response({"input_tokens": len(await exchange.tokenise(request))})
