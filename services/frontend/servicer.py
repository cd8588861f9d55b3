"""InferenceService: protobuf to the pipeline and back, no decisions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.api.inference.v1 import inference_pb2_grpc
from kvmesh.core import FinishReason
from kvmesh.errors import DeadlineError, InternalError, InvalidRequestError, MeshError, UnsupportedError
from kvmesh.rpc.codec.inference import (
    ChatCall,
    GenerateCall,
    Options,
    ToolCallPiece,
    from_chat_request,
    from_embed_request,
    from_generate_request,
    to_chat_response,
    to_chat_usage,
    to_embed_response,
    to_generate_response,
    to_generate_usage,
)
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.deadline import remaining_s
from kvmesh.rpc.http_status import http_status
from kvmesh.telemetry import current_traceparent
from services.frontend.answering import News, PulledOutlet
from services.frontend.embed import EmbedRequest
from services.frontend.metrics import UNKNOWN_MODEL
from services.frontend.parsers.parts import WARNINGS, CallArguments, CallBegin, Part, Reasoning, Warned
from services.frontend.pipeline import Pipeline
from services.frontend.prepare import Prepared, tokens_of
from services.frontend.reading import Reading, reading_of
from services.frontend.request import Answer, Conversation, Prompt, Request, ToolChoice, ToolMode

_log = logging.getLogger(__name__)
SERVICE_NAME = "kvmesh.inference.v1.InferenceService"
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias", "constraint",
)  # fmt: skip
_FIELDS = {name: f"options.sampling.{name}" for name in _SAMPLING_FIELDS} | {
    name: f"options.{name}" for name in ("choices", "priority", "cache_salt", "adapter", "request_id")
}


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves gRPC clients. Failures leave as MeshError; the server's interceptor makes statuses of them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def Generate(
        self, request: pb.GenerateRequest, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        began_s = self._pipeline.clock.now()
        call = from_generate_request(request)
        asked = self._request(call.model, call.prompt, call.options, context, prompt_field="prompt")
        async with _Running(self._pipeline, asked, call.options, began_s) as running:
            echo = _echo(call, running.prepared) if call.echoes else ""
            opened: set[int] = set()
            async for news in running.news():
                text = news.text if news.choice in opened else echo + news.text
                opened.add(news.choice)
                yield to_generate_response(
                    asked.request_id,
                    news.choice,
                    text=text,
                    token_ids=news.token_ids if call.options.returns_token_ids else (),
                    logprobs=news.logprobs,
                    finish=news.ending.reason if news.ending is not None else None,
                    prompt_logprobs=news.prompt_logprobs,
                )
            yield to_generate_usage(asked.request_id, running.answer.usage)

    async def Chat(self, request: pb.ChatRequest, context: ServicerContext[Any, Any]) -> AsyncIterator[pb.ChatResponse]:
        began_s = self._pipeline.clock.now()
        call = from_chat_request(request)
        conversation = _conversation(call)
        asked = self._request(call.model, conversation, call.options, context, prompt_field="messages")
        async with _Running(self._pipeline, asked, call.options, began_s) as running:
            reading = reading_of(
                running.prepared.model,
                conversation,
                running.prepared.generation.token_ids,
                request_id=asked.request_id,
                choices=asked.choices,
                parses_tools=call.tool_choice != "none",
                constraint=running.prepared.generation.sampling.constraint,
            )
            async for news in running.news():
                response = _chat_response(asked.request_id, news, call.options, reading)
                if response is not None:
                    yield response
            usage = running.answer.usage
            yield to_chat_usage(asked.request_id, usage if reading is None else reading.counted(usage))

    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext[Any, Any]) -> pb.EmbedResponse:
        began_s = self._pipeline.clock.now()
        call = from_embed_request(request)
        asked = Request(
            request_id=self._pipeline.new_id(),
            model=call.model,
            prompt="",
            timeout_s=_timeout_s(None, remaining_s(context)),
            traceparent=current_traceparent(),
        )
        embed = EmbedRequest(asked=asked, inputs=call.inputs, dimensions=call.dimensions, inputs_name=call.inputs_name)
        result = await self._pipeline.embed(embed, began_s=began_s)
        return to_embed_response(result)

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext[Any, Any]) -> pb.TokenizeResponse:
        model = self._pipeline.models.find(required_text(request.model, "model", 256))
        kind = request.WhichOneof("input")
        if kind == "text":
            token_ids = model.text.tokenise(request.text, adds_special_tokens=request.add_special_tokens)
        elif kind == "chat":
            prompt = _conversation(from_chat_request(request.chat, prefix="chat."))
            asked = Request(request_id="", model=model.name, prompt=prompt, fields={"prompt": "chat.messages"})
            token_ids = await tokens_of(asked, model, self._pipeline.settings)
        else:
            raise InvalidRequestError("text or chat must be given", field="input")
        return pb.TokenizeResponse(token_ids=token_ids, context_tokens_max=model.context_tokens_max)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        models = [
            pb.Model(
                name=model.name,
                context_tokens_max=model.context_tokens_max,
                features=sorted(model.features),
                workers_ready=model.workers_ready,
                adapters=model.adapters,
            )
            for model in self._pipeline.models.served()
        ]
        return pb.ListModelsResponse(models=models)

    def _request(
        self, model: str, prompt: Prompt, options: Options, context: ServicerContext[Any, Any], *, prompt_field: str
    ) -> Request:
        if options.media:
            raise UnsupportedError("no worker takes media", field="options.media", reason="media_unsupported")
        return Request(
            request_id=options.request_id or self._pipeline.new_id(),
            model=model,
            prompt=prompt,
            sampling=options.sampling,
            choices=options.choices,
            adapter=options.adapter,
            cache_salt=options.cache_salt,
            priority=options.priority,
            session_id=options.session_id,
            timeout_s=_timeout_s(options.timeout_s, remaining_s(context)),
            traceparent=current_traceparent(),
            fields=_FIELDS | {"prompt": prompt_field},
        )


class _Running:
    """A request in a task of its own, so that its text can be taken while it runs. Leaving cancels what is left of it."""

    def __init__(self, pipeline: Pipeline, request: Request, options: Options, began_s: float) -> None:
        self._pipeline = pipeline
        self._request = request
        self._began_s = began_s
        self._outlet = PulledOutlet(is_whole=not options.is_stream)
        self._task: asyncio.Task[Answer] | None = None
        self._prepared: Prepared | None = None

    @property
    def prepared(self) -> Prepared:
        """The request as it was submitted."""
        assert self._prepared is not None
        return self._prepared

    @property
    def answer(self) -> Answer:
        """Totals, once `news` has ended."""
        assert self._task is not None
        return self._task.result()

    async def __aenter__(self) -> "_Running":
        try:
            self._prepared = await self._pipeline.prepare(self._request, began_s=self._began_s)
        except MeshError as error:
            self._account(error)
            raise
        run = self._pipeline.run(self._prepared, self._outlet, began_s=self._began_s)
        self._task = asyncio.create_task(run, name=f"request {self._request.request_id}")
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        self._account(error)

    async def news(self) -> AsyncIterator[News]:
        """What is new, as long as there is something. Raises the request's failure after what came before it."""
        task = self._task
        assert task is not None
        while True:
            for news in self._outlet.take():
                yield news
            if task.done():
                break
            await self._outlet.wait(task)
        for news in self._outlet.take():
            yield news
        task.result()

    def _account(self, error: BaseException | None) -> None:
        """Counts and logs the request, once."""
        code, reason = 200, "ok"
        if isinstance(error, MeshError):
            code, reason = http_status(error)[0], error.reason
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            code, reason = 499, "client_gone"
        elif error is not None:
            code, reason = 500, "internal"
        model = UNKNOWN_MODEL if self._prepared is None else self._prepared.model.name
        self._pipeline.metrics.requests.labels(model, str(code)).inc()
        is_answered = error is None and self._task is not None
        usage = self.answer.usage if is_answered else None
        data = {
            "request_id": self._request.request_id,
            "path": "grpc",
            "model": model,
            "code": code,
            "reason": reason,
            "prompt_tokens": usage.prompt_tokens if usage else 0,
            "output_tokens": usage.output_tokens if usage else 0,
            "duration_s": round(self._pipeline.clock.now() - self._began_s, 6),
        }
        _log.info("request_finished", extra={"data": data})


def _conversation(call: ChatCall) -> Conversation:
    return Conversation(
        messages=call.messages,
        tools=call.tools if call.tool_choice != "none" else (),
        tool_choice=_tool_choice(call),
        arguments=call.template_arguments,
    )


def _tool_choice(call: ChatCall) -> ToolChoice:
    mode, _, name = call.tool_choice.partition(":")
    if mode in ("required", "named") and not call.tools:
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice")
    if mode == "named" and name not in [tool["function"]["name"] for tool in call.tools]:
        raise InvalidRequestError("tool_name must be the name of one of the tools", field="tool_name")
    return ToolChoice(mode=ToolMode(mode), name=name)


def _chat_response(request_id: str, news: News, options: Options, reading: Reading | None) -> pb.ChatResponse | None:
    """None when all there is may still become a tool call."""
    finish = news.ending.reason if news.ending is not None else None
    text, reasoning, warning = news.text, "", None
    calls: tuple[ToolCallPiece, ...] = ()
    if reading is not None:
        choice = news.choice
        parts = [
            *reading.push(choice, text, len(news.token_ids)),
            *(reading.flush(choice) if finish is not None else ()),
        ]
        text = "".join(part for part in parts if isinstance(part, str))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        warning = _warning(parts)
        calls = _pieces(reading, choice, parts)
        if finish is FinishReason.STOP and reading.calls(choice):
            finish = FinishReason.TOOL_CALLS
        if not (text or reasoning or calls or warning or finish or news.logprobs or options.returns_token_ids):
            return None
    return to_chat_response(
        request_id,
        news.choice,
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        token_ids=news.token_ids if options.returns_token_ids else (),
        logprobs=news.logprobs,
        finish=finish,
        warning=warning,
    )


def _warning(parts: Sequence[Part]) -> MeshError | None:
    reason = next((part.reason for part in parts if isinstance(part, Warned)), None)
    return None if reason is None else InternalError(WARNINGS[reason], reason=reason)


def _pieces(reading: Reading, choice: int, parts: Sequence[Part]) -> tuple[ToolCallPiece, ...]:
    """One piece per call: its name if it began here, and what came of its arguments."""
    pieces: dict[int, ToolCallPiece] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            call_id = reading.call_id(choice, part)
            pieces[part.number] = ToolCallPiece(index=part.number, call_id=call_id, name=part.name, arguments="")
        elif isinstance(part, CallArguments):
            known = pieces.get(part.number) or ToolCallPiece(index=part.number, call_id="", name="", arguments="")
            pieces[part.number] = replace(known, arguments=known.arguments + part.text)
    return tuple(pieces.values())


def _echo(call: GenerateCall, prepared: Prepared) -> str:
    return call.prompt if isinstance(call.prompt, str) else prepared.model.text.decode(prepared.generation.token_ids)


def _timeout_s(own_s: float | None, call_s: float | None) -> float | None:
    limits = [limit for limit in (own_s, call_s) if limit is not None]
    if limits and min(limits) <= 0:
        raise DeadlineError("the caller's deadline has passed")
    return min(limits, default=None)
