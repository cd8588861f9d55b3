"""One line of a batch through the pipeline, as a line of the output or of the error file."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
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
from kvmesh.rpc.http_status import http_status
from services.frontend.access.caller import current_caller
from services.frontend.api.batches.lines import Line
from services.frontend.api.batches.settings import BatchSettings
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.bodies import error_body
from services.frontend.api.openai.chat_request import read_chat
from services.frontend.api.openai.completion_request import read_completion
from services.frontend.api.openai.embeddings import embeddings_body, read_embeddings
from services.frontend.api.openai.serve import whole_body
from services.frontend.api.responses.serve import Responses
from services.frontend.api.run import reading_for
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.stores.batches import Result

_log = logging.getLogger(__name__)
_LOST = (LostError, KvLostError, DeadlineError)
_RETRY_S = 0.2


class DrainingError(Exception):
    """The frontend takes no new requests: the line is left to another."""


@dataclass(slots=True, kw_only=True)
class LineAttempt:
    """One attempt at a line, and its totals."""

    pipeline: Pipeline
    began_s: float
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None
    model_name: str = ""


Endpoint = Callable[[LineAttempt, Mapping[str, Any], str, str], Awaitable[Mapping[str, Any]]]
"""Attempt, body, request id, owner: the body of the answer."""


ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class Endpoints:
    """What a batch can ask for, by path. The readers are those of the HTTP API."""

    def __init__(self, responses: Responses, settings: BatchSettings) -> None:
        self._responses = responses
        self._priority = settings.priority
        answerers: tuple[Endpoint, ...] = (self._chat, self._completion, self._embedding, self._response)
        self._endpoints = dict(zip(ENDPOINTS, answerers, strict=True))

    async def answer(
        self, path: str, attempt: LineAttempt, body: Mapping[str, Any], request_id: str, owner: str
    ) -> Mapping[str, Any]:
        """The answer's body; raises MeshError."""
        if body.get("stream"):
            raise InvalidRequestError("stream must be false in a batch", field="stream", reason="invalid_value")
        return await self._endpoints[path](attempt, body, request_id, owner)

    async def _chat(self, attempt: LineAttempt, body: Mapping[str, Any], request_id: str, _: str) -> Mapping[str, Any]:
        return await self._whole(attempt, read_chat(body, request_id))

    async def _completion(
        self, attempt: LineAttempt, body: Mapping[str, Any], request_id: str, _: str
    ) -> Mapping[str, Any]:
        return await self._whole(attempt, read_completion(body, request_id, attempt.pipeline.settings))

    async def _embedding(
        self, attempt: LineAttempt, body: Mapping[str, Any], request_id: str, _: str
    ) -> Mapping[str, Any]:
        request, form = read_embeddings(body, request_id)
        attempt.model_name = attempt.pipeline.models.find(request.asked.model).name
        request = replace(request, asked=replace(request.asked, priority=self._priority))
        result = await attempt.pipeline.embed(request, began_s=attempt.began_s)
        attempt.usage = result.usage
        return embeddings_body(request.asked.model, result, form)

    async def _whole(self, attempt: LineAttempt, asked: Asked) -> Mapping[str, Any]:
        pipeline = attempt.pipeline
        attempt.model_name = pipeline.models.find(asked.model).name
        requests = [replace(each, priority=self._priority) for each in asked.requests]
        prepared = [await pipeline.prepare(each, began_s=attempt.began_s) for each in requests]
        asked = replace(asked, requests=requests)
        return await whole_body(attempt, asked, prepared, int(pipeline.clock.wall()), reading_for(asked, prepared))

    async def _response(
        self, attempt: LineAttempt, body: Mapping[str, Any], request_id: str, owner: str
    ) -> Mapping[str, Any]:
        asked, prepared, request = await self._responses.prepare(
            attempt.pipeline, body, request_id, owner, attempt, priority=self._priority
        )
        attempt.model_name = prepared.model.name
        return await self._responses.answer(attempt, asked, prepared, request, owner)


class LineRunner:
    """Runs lines to their end. What was refused for load is tried until the batch's time is over, what was lost a few times."""

    def __init__(self, pipeline: Pipeline, endpoints: Endpoints, settings: BatchSettings, generator: Random) -> None:
        self._pipeline = pipeline
        self._endpoints = endpoints
        self._settings = settings
        self._random = generator

    async def run(self, endpoint: str, owner: str, line: Line) -> Result:
        """The line's result. DrainingError when the frontend stops before it has one."""
        lost = 0
        pause_s = _RETRY_S
        while True:
            request_id = self._pipeline.new_id()
            attempt = LineAttempt(pipeline=self._pipeline, began_s=self._pipeline.clock.now())
            try:
                # The line runs in a task of its own, long after the request that made the batch.
                current_caller.set(self._pipeline.access.caller_of(owner))
                body = await self._endpoints.answer(endpoint, attempt, line.body, request_id, owner)
                return self._result(line, attempt, request_id, 200, body)
            except (OverloadedError, UnavailableError) as error:
                if self._pipeline.is_draining:
                    raise DrainingError from error
                pause_s = min(self._settings.retry_s_max, max(error.retry_after_s or 0.0, pause_s * 2))
            except _LOST as error:
                lost += 1
                if lost >= self._settings.attempts_max:
                    return self._result(line, attempt, request_id, http_status(error)[0], error_body(error))
            except MeshError as error:
                return self._result(line, attempt, request_id, http_status(error)[0], error_body(error))
            except Exception as error:  # noqa: BLE001 (the boundary that keeps a defect from ending the batch; logged)
                _log.error("batch_line_defect", exc_info=error, extra={"data": {"request_id": request_id}})
                failure = InternalError(f"internal error {request_id}", request_id=request_id)
                return self._result(line, attempt, request_id, 500, error_body(failure))
            await asyncio.sleep(pause_s * (0.5 + self._random.random()))

    def _result(
        self, line: Line, attempt: LineAttempt, request_id: str, status: int, body: Mapping[str, Any]
    ) -> Result:
        self._pipeline.metrics.requests.of(attempt.model_name or UNKNOWN_MODEL, str(status)).value += 1
        response = {"status_code": status, "request_id": request_id, "body": body}
        record = orjson.dumps(
            {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": None}
        )
        return Result(line=line.number, is_error=status != 200, record=record, usage=attempt.usage)


def unrun_result(line: Line, request_id: str, code: str, message: str) -> Result:
    """The result of a line that was not run."""
    error = {"code": code, "message": message}
    record = orjson.dumps(
        {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": None, "error": error}
    )
    return Result(line=line.number, is_error=True, record=record, usage=Usage())
