"""POST /v1/chat/completions and /v1/completions: whole, or as a stream."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from services.frontend.api.answer_reader import Reading
from services.frontend.api.http.exchange import Exchange, json_response
from services.frontend.api.http.steering import steer
from services.frontend.api.http.streaming import stream_answer
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.bodies import Collected, chat_body, completion_body
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.chunks import ChatChunks, Chunks, CompletionChunks
from services.frontend.api.openai.completion_request import read_completion
from services.frontend.api.run import RunContext, reading_for, run_all
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import Conversation


async def serve_chat(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _serve(exchange, await exchange.read_request(lambda values: read_chat(values, exchange.request_id)))


async def serve_completion(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/completions."""
    settings = exchange.pipeline.settings
    asked = await exchange.read_request(lambda values: read_completion(values, exchange.request_id, settings))
    return await _serve(exchange, asked)


async def _serve(exchange: Exchange, asked: Asked) -> web.StreamResponse:
    pipeline = exchange.pipeline
    exchange.model_name = pipeline.models.find(asked.model).name
    requests = [steer(each, exchange.request.headers, exchange.settings) for each in asked.requests]
    prepared = [await pipeline.prepare(each, began_s=exchange.began_s) for each in requests]
    created_s = int(pipeline.clock.wall())
    reading = reading_for(asked, prepared)
    if not asked.is_stream:
        body = await whole_body(exchange, asked, prepared, created_s, reading)
        exchange.warn(*(reading.warnings if reading is not None else ()))
        return json_response(body, headers=exchange.headers)
    model, prompt_ids = prepared[0].model, [each.generation.token_ids for each in prepared]
    chunks: Chunks
    if _is_chat(asked):
        chunks = ChatChunks(asked, model, created_s, prompt_ids[0], reading)
    else:
        chunks = CompletionChunks(asked, model, created_s, _echoes(asked, prepared), prompt_ids)
    is_detailed = asked.has_logprobs or asked.returns_token_ids
    return await stream_answer(exchange, prepared, chunks, asked.choices, reading=reading, is_detailed=is_detailed)


async def whole_body(
    context: RunContext, asked: Asked, prepared: Sequence[Prepared], created_s: int, reading: Reading | None
) -> dict[str, Any]:
    """Runs the requests; returns the JSON body of their answer."""
    model = prepared[0].model
    collected = Collected(asked.choices, reading)
    await run_all(context, prepared, collected, reading)
    if asked.is_prompt_only:
        collected.drop_answer()
        context.usage = replace(context.usage, output_tokens=0)
    usage = context.usage
    prompt_ids = [each.generation.token_ids for each in prepared]
    if _is_chat(asked):
        return chat_body(asked, model, collected, usage, created_s=created_s, prompt_ids=prompt_ids[0])
    echoes = _echoes(asked, prepared)
    return completion_body(asked, model, collected, usage, created_s=created_s, echoes=echoes, prompt_ids=prompt_ids)


def _echoes(asked: Asked, prepared: Sequence[Prepared]) -> list[str]:
    return [_echo(each) if asked.echoes else "" for each in prepared]


def _echo(prepared: Prepared) -> str:
    request = prepared.request
    if isinstance(request.prompt, str):
        return request.prompt
    skips = request.sampling.skip_special_tokens
    return prepared.model.text.decode(prepared.generation.token_ids, skip_special_tokens=skips)


def _is_chat(asked: Asked) -> bool:
    return isinstance(asked.requests[0].prompt, Conversation)
