"""One HTTP request through the pipeline: whole or as a stream."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from kvmesh.core import TokenLogprob, Usage
from kvmesh.errors import InternalError, MeshError
from kvmesh.rpc.http_status import http_status
from services.frontend.api.http.event_pace import EventPace
from services.frontend.api.http.half_close import STREAM
from services.frontend.api.http.steering import steer
from services.frontend.api.http.stream import EventStream
from services.frontend.api.openai.asked import Asked
from services.frontend.api.openai.bodies import Collected, chat_body, completion_body, sum_usage, to_json
from services.frontend.api.openai.chunks import ChatChunks, Chunks, CompletionChunks
from services.frontend.api.reading import Reading, reading_of
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import Prepared
from services.frontend.pipeline.request import AnswerSink, Conversation, Ending, RequestResult
from services.frontend.settings import HttpSettings

_log = logging.getLogger(__name__)
WARNING_HEADER = "X-Kvmesh-Warning"
CLIENT_GONE = 499
"""nginx's word for a client that did not wait for its answer."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One HTTP request and what is to be told of it in the end."""

    request: web.Request
    pipeline: Pipeline
    settings: HttpSettings
    pace: EventPace
    began_s: float
    request_id: str
    client_id: str
    headers: dict[str, str]
    code: int = 200
    reason: str = "ok"
    model_name: str = ""
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None


class WrittenResponse(web.StreamResponse):
    """Stands for a response that was written to the transport already; the framework has nothing to do."""

    def __init__(self, *, keeps_alive: bool) -> None:
        super().__init__()
        self._keeps_alive = keeps_alive

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection takes another request."""
        return self._keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing: the head is written."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing: the end is written."""


async def serve(exchange: Exchange, asked: Asked) -> web.StreamResponse:
    """The answer. Raises what happened before its first byte."""
    pipeline = exchange.pipeline
    model = pipeline.models.find(asked.model)
    exchange.model_name = model.name
    requests = [steer(each, exchange.request.headers, exchange.settings) for each in asked.requests]
    prepared = [await pipeline.prepare(each, began_s=exchange.began_s) for each in requests]
    created_s = int(pipeline.clock.wall())
    reading = read_of(asked, prepared)
    if asked.is_stream:
        return await _serve_stream(exchange, asked, prepared, created_s, reading)
    body = await whole_body(exchange, asked, prepared, created_s, reading)
    headers = exchange.headers | warning_headers(reading)
    return web.Response(body=to_json(body), headers=headers, content_type="application/json")


class Effort(Protocol):
    """What running a request needs and tells: an exchange, or a line of a batch."""

    pipeline: Pipeline
    began_s: float
    usage: Usage
    ttft_s: float | None


async def whole_body(
    exchange: Effort, asked: Asked, prepared: Sequence[Prepared], created_s: int, reading: Reading | None
) -> dict[str, Any]:
    """The whole answer as its JSON body. `reading`: see `read_of`."""
    model = prepared[0].model
    collected = Collected(asked.choices, reading)
    answers = await run_all(exchange, prepared, collected)
    exchange.usage = usage = _usage(answers, reading)
    if asked.is_prompt_only:
        collected.drop_answer()
        exchange.usage = usage = replace(usage, output_tokens=0)
    prompt_ids = [each.generation.token_ids for each in prepared]
    if _is_chat(asked):
        return chat_body(asked, model, collected, usage, created_s=created_s, prompt_ids=prompt_ids[0])
    echoes = _echoes(asked, prepared)
    return completion_body(asked, model, collected, usage, created_s=created_s, echoes=echoes, prompt_ids=prompt_ids)


def read_of(asked: Asked, prepared: Sequence[Prepared]) -> Reading | None:
    """How a chat's answer is read; None for completions and where nothing is to be read."""
    request, first = asked.requests[0], prepared[0]
    if not isinstance(request.prompt, Conversation):
        return None
    return reading_of(
        first.model,
        request.prompt,
        first.generation.token_ids,
        request_id=request.request_id,
        choices=asked.choices,
        parses_tools=asked.parses_tools,
        includes_reasoning=asked.includes_reasoning,
        constraint=first.generation.sampling.constraint,
    )


def warning_headers(reading: Reading | None) -> dict[str, str]:
    """What was wrong with the answer's calls, for a response whose head is not sent yet."""
    return {WARNING_HEADER: ", ".join(reading.warnings)} if reading is not None and reading.warnings else {}


def _usage(answers: Sequence[RequestResult], reading: Reading | None) -> Usage:
    usage = sum_usage([answer.usage for answer in answers])
    return usage if reading is None else reading.counted(usage)


async def run_all(exchange: Effort, prepared: Sequence[Prepared], outlet: AnswerSink) -> list[RequestResult]:
    """Runs one request per prompt; the first failure ends all."""
    if len(prepared) == 1:
        answers = [await exchange.pipeline.run(prepared[0], outlet, began_s=exchange.began_s)]
    else:
        answers = await _run_several(exchange, prepared, outlet)
    exchange.ttft_s = min((answer.ttft_s for answer in answers if answer.ttft_s is not None), default=None)
    return answers


async def _run_several(exchange: Effort, prepared: Sequence[Prepared], outlet: AnswerSink) -> list[RequestResult]:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    exchange.pipeline.run(
                        each, ShiftedOutlet(outlet, i * each.request.choices), began_s=exchange.began_s
                    )
                )
                for i, each in enumerate(prepared)
            ]
    except* MeshError as errors:
        first = errors.exceptions[0]
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        failure = first
    else:
        return [task.result() for task in running]
    raise failure


class ShiftedOutlet:
    """An outlet for one prompt of several: its choices are numbered from `first` on."""

    def __init__(self, outlet: AnswerSink, first: int) -> None:
        self._outlet = outlet
        self._first = first
        self.is_whole = outlet.is_whole

    def on_restart(self, choice: int) -> None:
        """See AnswerSink."""
        self._outlet.on_restart(self._first + choice)

    def on_text(
        self, choice: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """See AnswerSink."""
        self._outlet.on_text(self._first + choice, text, token_ids, logprobs)

    def on_prompt(self, choice: int, entries: Sequence[TokenLogprob]) -> None:
        """See AnswerSink."""
        self._outlet.on_prompt(self._first + choice, entries)

    def on_end(self, choice: int, ending: Ending) -> None:
        """See AnswerSink."""
        self._outlet.on_end(self._first + choice, ending)


async def _serve_stream(
    exchange: Exchange, asked: Asked, prepared: Sequence[Prepared], created_s: int, reading: Reading | None
) -> web.StreamResponse:
    chunks = _chunks(asked, prepared, created_s, reading)
    is_detailed = asked.has_logprobs or asked.returns_token_ids
    return await stream_answer(exchange, prepared, chunks, asked.choices, reading=reading, is_detailed=is_detailed)


async def stream_answer(
    exchange: Exchange,
    prepared: Sequence[Prepared],
    chunks: Chunks,
    choices: int,
    *,
    stream_type: type[EventStream] = EventStream,
    reading: Reading | None = None,
    on_answered: Callable[[Usage], Awaitable[None]] | None = None,
    is_detailed: bool = False,
) -> web.StreamResponse:
    """Runs the requests and writes their events as they come. Raises what happened before the first.

    `on_answered` runs when every token came and before the last events are written. `is_detailed`: the events hold more
    than text, and only so many are written (see EventPace).
    """
    request = exchange.request
    transport = request.transport
    if transport is None or transport.is_closing():
        raise asyncio.CancelledError("the client is gone")
    is_chunked = request.version >= (1, 1)
    stream = stream_type(
        transport,
        _head(exchange, is_chunked=is_chunked),
        chunks,
        choices=choices,
        is_chunked=is_chunked,
        buffer_bytes_max=exchange.settings.stream_buffer_bytes_max,
        tokens_max=prepared[0].generation.sampling.max_tokens,
        pace=exchange.pace if is_detailed else None,
    )
    request[STREAM] = stream
    keeps_alive = is_chunked and request.keep_alive
    beat = _Beat(stream, exchange.settings.keep_alive_s)
    try:
        with exchange.pace.opened() if is_detailed else nullcontext():
            answers = await run_all(exchange, prepared, stream)
        exchange.usage = _usage(answers, reading)
        if on_answered is not None:
            await on_answered(exchange.usage)
        stream.close_well(exchange.usage)
    except Exception as error:
        if not stream.has_begun:
            raise
        failure = error if isinstance(error, MeshError) else defect(error, exchange.request_id)
        exchange.code, exchange.reason = http_status(failure)[0], failure.reason
        # The response is complete, so the connection takes the next request: a client may have sent one already, and would
        # lose its answer for another's failure.
        stream.close_failed(failure)
    finally:
        beat.end()
        stream.abandon()
    if not await stream.wait_sent(exchange.settings.stalled_client_timeout_s):
        exchange.code, exchange.reason = CLIENT_GONE, "client_stalled"
    return WrittenResponse(keeps_alive=keeps_alive)


class _Beat:
    """Keeps a stream alive every `interval_s`; 0: never."""

    def __init__(self, stream: EventStream, interval_s: float) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def _wait(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._beat)

    def _beat(self) -> None:
        self._stream.keep_alive()
        self._wait()

    def end(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()


def defect(error: Exception, request_id: str) -> InternalError:
    """Logs a defect; the client learns the id and nothing else."""
    _log.error("request_defect", exc_info=error, extra={"data": {"request_id": request_id}})
    return InternalError(f"internal error {request_id}", request_id=request_id)


def _head(exchange: Exchange, *, is_chunked: bool) -> bytes:
    """The response's head. Header values were checked to be printable ASCII."""
    lines = [
        f"HTTP/1.1 200 {HTTPStatus.OK.phrase}",
        "Content-Type: text/event-stream; charset=utf-8",
        "Cache-Control: no-cache",
        # Proxies that collect responses would undo streaming.
        "X-Accel-Buffering: no",
        *(f"{name}: {value}" for name, value in exchange.headers.items()),
        *(("Connection: close",) if not (is_chunked and exchange.request.keep_alive) else ()),
        *(("Transfer-Encoding: chunked",) if is_chunked else ()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _chunks(asked: Asked, prepared: Sequence[Prepared], created_s: int, reading: Reading | None) -> Chunks:
    model = prepared[0].model
    prompt_ids = [each.generation.token_ids for each in prepared]
    if _is_chat(asked):
        return ChatChunks(asked, model, created_s, prompt_ids[0], reading)
    return CompletionChunks(asked, model, created_s, _echoes(asked, prepared), prompt_ids)


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
