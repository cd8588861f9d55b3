"""POST /v1/chat/completions and /v1/completions: whole, or as a stream."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from services.frontend.api.answer_blocks import AnswerCollector
from services.frontend.api.answer_reader import AnswerReader, make_reader
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.steering import steer
from services.frontend.api.http.stream import EventEncoder
from services.frontend.api.http.streaming import stream_answer
from services.frontend.api.openai.bodies import chat_body, completion_body
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.chunks import ChatChunks, CompletionChunks
from services.frontend.api.openai.completion_request import read_completion
from services.frontend.api.run import ApiRequest, RequestContext, run_all
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Conversation


async def serve_chat(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _serve(exchange, await exchange.read_request(lambda values: read_chat(values, exchange.request_id)))


async def serve_completion(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/completions."""
    settings = exchange.pipeline.settings
    request = await exchange.read_request(lambda values: read_completion(values, exchange.request_id, settings))
    return await _serve(exchange, request)


async def _serve(exchange: Exchange, request: ApiRequest) -> web.StreamResponse:
    prepared = [await exchange.prepare(steer(each, exchange)) for each in request.requests]
    reader = make_reader(prepared[0], choices=request.choices, includes_reasoning=request.includes_reasoning)
    if not request.is_stream:
        body = await whole_body(exchange, request, prepared, reader=reader)
        exchange.warn(*reader.warnings)
        return exchange.json_response(body)
    created_s = int(exchange.pipeline.clock.wall())
    encoder: EventEncoder
    if isinstance(request.requests[0].prompt, Conversation):
        encoder = ChatChunks(request, prepared[0], reader, created_s=created_s)
    else:
        encoder = CompletionChunks(request, prepared, created_s=created_s)
    is_detailed = request.has_logprobs or request.returns_token_ids
    run = partial(run_all, exchange, prepared, reader=reader)
    return await stream_answer(exchange, prepared, encoder, run=run, choices=request.choices, is_detailed=is_detailed)


async def whole_body(
    context: RequestContext, request: ApiRequest, prepared: Sequence[Prepared], *, reader: AnswerReader
) -> dict[str, Any]:
    """Runs the requests and returns the JSON body of their answer."""
    created_s = int(context.pipeline.clock.wall())
    collected = AnswerCollector(reader)
    await run_all(context, prepared, collected, reader=reader)
    if isinstance(request.requests[0].prompt, Conversation):
        return chat_body(request, prepared[0], collected, usage=context.usage, created_s=created_s)
    if request.is_prompt_only:
        context.usage = replace(context.usage, output_tokens=0)
    return completion_body(request, prepared, collected, usage=context.usage, created_s=created_s)
