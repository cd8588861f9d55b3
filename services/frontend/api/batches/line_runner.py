"""Runs one line of a batch through the pipeline. The result is a line of the output or of the error file."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import orjson

from kvmesh.core import Usage
from kvmesh.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    KvLostError,
    LostError,
    MeshError,
    OverloadedError,
    UnavailableError,
)
from kvmesh.event_log import event_logger
from kvmesh.rpc.http_status import http_status
from services.frontend.access.caller import ANYBODY
from services.frontend.api.answer_reader import make_reader
from services.frontend.api.anthropic.body import MESSAGES_PATH
from services.frontend.api.anthropic.body import error_body as messages_error_body
from services.frontend.api.anthropic.read import read_message
from services.frontend.api.anthropic.serve import whole_message
from services.frontend.api.batches.lines import BatchLine
from services.frontend.api.openai.bodies import error_body
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.completion_request import read_completion
from services.frontend.api.openai.embeddings import embeddings_answer, read_embeddings
from services.frontend.api.openai.serve import whole_body
from services.frontend.api.responses.serve import Responses
from services.frontend.api.run import RequestContext
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.settings import BatchSettings
from services.frontend.stores.batches import LineResult

_log = event_logger(__name__)
_LOST = (LostError, KvLostError, DeadlineError)
_RETRY_S = 0.2
_ATTEMPTS_MAX = 3
"""Attempts at a request whose worker is lost. Each places the request several times, so more attempts rarely help."""
CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)


class DrainingError(Exception):
    """The frontend takes no new requests: another one must run the line."""


class LineRunner:
    """Runs lines to their end: retries refusals for load until the batch expires, and lost requests `_ATTEMPTS_MAX` times."""

    def __init__(self, *, pipeline: Pipeline, responses: Responses, settings: BatchSettings, generator: Random) -> None:
        self._pipeline = pipeline
        self._responses = responses
        self._settings = settings
        self._random = generator

    async def run(self, endpoint: str, owner: str, line: BatchLine) -> LineResult:
        """Returns the line's result. Raises DrainingError if the frontend stops before there is one."""
        pipeline = self._pipeline
        to_error_body = messages_error_body if endpoint == MESSAGES_PATH else error_body
        lost = 0
        pause_s = _RETRY_S
        while True:
            context = RequestContext(
                pipeline=pipeline, request_id=pipeline.new_id(), began_s=pipeline.clock.now(), caller=ANYBODY
            )
            try:
                # The batch may have been created long ago, with a key that has been revoked since.
                context.caller = pipeline.access.caller_of(owner)
                return self._result(line, context, 200, body=await self._answer(endpoint, context, line.body))
            except (OverloadedError, UnavailableError) as error:
                if pipeline.is_draining:
                    raise DrainingError from error
                pause_s = min(self._settings.retry_s_max, max(error.retry_after_s or 0.0, pause_s * 2))
            except MeshError as error:
                lost += isinstance(error, _LOST)
                if not isinstance(error, _LOST) or lost >= _ATTEMPTS_MAX:
                    return self._result(line, context, http_status(error)[0], body=to_error_body(error))
            except Exception as error:  # noqa: BLE001 (the boundary that keeps a defect from ending the batch; logged)
                request_id = context.request_id
                _log.error("batch_line_defect", exc_info=error, request_id=request_id)
                failure = InternalError(f"internal error {request_id}", request_id=request_id)
                return self._result(line, context, 500, body=to_error_body(failure))
            await asyncio.sleep(pause_s * (0.5 + self._random.random()))

    async def _answer(self, endpoint: str, context: RequestContext, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the JSON body of the answer. The readers are those of the HTTP API."""
        if body.get("stream"):
            raise InvalidRequestError("stream must be false in a batch", field="stream", reason="invalid_value")
        priority = self._settings.priority
        if endpoint == RESPONSES:
            parsed = self._responses.parse(body)
            return await self._responses.answer(
                context, await self._responses.prepare(context, parsed, priority=priority)
            )
        if endpoint == EMBEDDINGS:
            embed, form = read_embeddings(body, context.request_id)
            embed = replace(embed, asked=replace(embed.asked, priority=priority))
            return await embeddings_answer(context, embed, form)
        if endpoint == MESSAGES_PATH:
            request, _ = read_message(body, context.request_id)
            prepared_message = await context.prepare(replace(request.requests[0], priority=priority))
            reader = make_reader(prepared_message, choices=1)
            return await whole_message(context, request.model, prepared_message, reader=reader)
        if endpoint == CHAT:
            request = read_chat(body, context.request_id)
        else:
            request = read_completion(body, context.request_id, self._pipeline.settings)
        prepared = [await context.prepare(replace(each, priority=priority)) for each in request.requests]
        reader = make_reader(prepared[0], choices=request.choices, includes_reasoning=request.includes_reasoning)
        return await whole_body(context, request, prepared, reader=reader)

    def _result(self, line: BatchLine, context: RequestContext, status: int, *, body: Mapping[str, Any]) -> LineResult:
        self._pipeline.metrics.requests.of(context.model_name or UNKNOWN_MODEL, str(status)).value += 1
        response = {"status_code": status, "request_id": context.request_id, "body": body}
        record = _record(line, context.request_id, response=response, error=None)
        return LineResult(line=line.number, is_error=status != 200, record=record, usage=context.usage)


def unrun_result(line: BatchLine, *, request_id: str, code: str, message: str) -> LineResult:
    """Returns the result of a line that was not run."""
    record = _record(line, request_id, response=None, error={"code": code, "message": message})
    return LineResult(line=line.number, is_error=True, is_unrun=True, record=record, usage=Usage())


def _record(line: BatchLine, request_id: str, *, response: Any, error: Any) -> bytes:
    return orjson.dumps(
        {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": error}
    )
