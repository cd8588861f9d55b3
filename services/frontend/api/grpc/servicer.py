"""InferenceService: protobuf to the pipeline and back, no decisions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpc.aio import ServicerContext

from kvmesh.api.inference.v1 import inference_pb2 as pb
from kvmesh.constraint_costs import judge_long
from kvmesh.core import FinishReason
from kvmesh.errors import InternalError, InvalidRequestError, MeshError
from kvmesh.rpc.codec.inference import (
    MODEL_CHARACTERS_MAX,
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
from kvmesh.rpc.codec.sampling import from_constraint
from kvmesh.rpc.codec.scalars import required_text
from kvmesh.rpc.deadline import remaining_s
from services.frontend.access.interceptor import rpc_caller
from services.frontend.api.answer_blocks import AnswerUpdate
from services.frontend.api.answer_reader import AnswerReader, make_reader
from services.frontend.api.batches.service import BatchService
from services.frontend.api.batches.servicer import BatchServicer
from services.frontend.api.grpc.requests import chat_request, conversation_of, embed_request, generate_request
from services.frontend.api.grpc.running import RunningRequest, accounted
from services.frontend.api.grpc.stream_writer import StreamWriter
from services.frontend.api.openai.bodies import echoed_prompt
from services.frontend.api.run import RequestContext
from services.frontend.models import ServedModel
from services.frontend.parsers.parts import WARNINGS, CallArguments, CallBegin, Part, Reasoning, Warned
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.prepare import checked_ids
from services.frontend.pipeline.request import Prompt, Request

SERVICE_NAME = "kvmesh.inference.v1.InferenceService"


class InferenceServicer(BatchServicer):
    """Serves gRPC clients. Raises MeshError; the server's interceptor converts it to a status."""

    def __init__(self, pipeline: Pipeline, batches: Callable[[], BatchService | None] = lambda: None) -> None:
        super().__init__(batches)
        self._pipeline = pipeline

    def _context(self, client_id: str = "") -> RequestContext:
        pipeline = self._pipeline
        return RequestContext(
            pipeline=pipeline,
            request_id=pipeline.new_id(),
            client_id=client_id,
            began_s=pipeline.clock.now(),
            caller=rpc_caller.get(),
        )

    async def Generate(  # type: ignore[override]  # it writes, so that a client that reads nothing gets a status
        self, request: pb.GenerateRequest, context: ServicerContext[Any, Any]
    ) -> None:
        async with StreamWriter(context, unread_timeout_s=self._pipeline.settings.unread_timeout_s) as writer:
            await self._generate(request, context, writer)

    async def _generate(
        self, request: pb.GenerateRequest, context: ServicerContext[Any, Any], writer: StreamWriter
    ) -> None:
        await _judge_long_constraint(request.options)
        call = from_generate_request(request)
        api_context = self._context(call.options.request_id)
        request_id = api_context.request_id
        generate = generate_request(call, request_id, remaining_s(context))
        async with RunningRequest(api_context, generate, is_stream=call.options.is_stream) as running:
            echo = echoed_prompt(running.prepared) if call.echoes else ""
            opened: set[int] = set()
            async for update in running.updates():
                text = update.text if update.choice in opened else echo + update.text
                opened.add(update.choice)
                response = to_generate_response(
                    request_id,
                    update.choice,
                    text=text,
                    token_ids=update.token_ids if call.options.returns_token_ids else (),
                    logprobs=update.logprobs,
                    finish=update.ending.reason if update.ending is not None else None,
                    prompt_logprobs=update.prompt_logprobs,
                )
                await writer.write(response)
            await writer.write(to_generate_usage(request_id, api_context.usage))

    async def Chat(  # type: ignore[override]  # as Generate
        self, request: pb.ChatRequest, context: ServicerContext[Any, Any]
    ) -> None:
        async with StreamWriter(context, unread_timeout_s=self._pipeline.settings.unread_timeout_s) as writer:
            await self._chat(request, context, writer)

    async def _chat(self, request: pb.ChatRequest, context: ServicerContext[Any, Any], writer: StreamWriter) -> None:
        await _judge_long_constraint(request.options)
        call = from_chat_request(request)
        api_context = self._context(call.options.request_id)
        request_id = api_context.request_id
        chat = chat_request(call, request_id, remaining_s(context))
        async with RunningRequest(api_context, chat, is_stream=call.options.is_stream) as running:
            reader = make_reader(running.prepared, choices=chat.choices, includes_reasoning=call.includes_reasoning)
            async for update in running.updates():
                response = _chat_response(request_id, update, call.options, reader=reader)
                if response is not None:
                    await writer.write(response)
            await writer.write(to_chat_usage(request_id, reader.add_reasoning_tokens(api_context.usage)))

    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext[Any, Any]) -> pb.EmbedResponse:
        api_context = self._context()
        embed = embed_request(from_embed_request(request), api_context.request_id, remaining_s(context))
        with accounted(api_context):
            result = await self._pipeline.embed(embed, caller=api_context.caller, began_s=api_context.began_s)
            api_context.model_name, api_context.usage = embed.asked.model, result.usage
        return to_embed_response(result)

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext[Any, Any]) -> pb.TokenizeResponse:
        context_of_call = self._context()
        model = context_of_call.find_model(
            required_text(request.model, field="model", characters_max=MODEL_CHARACTERS_MAX)
        )
        kind = request.WhichOneof("input")
        if kind == "text":
            prompt: Prompt = request.text
            field = "text"
        elif kind == "chat":
            # The request names the model; the conversation's own `model` is ignored.
            request.chat.model = request.chat.model or request.model
            prompt = conversation_of(from_chat_request(request.chat, prefix="chat."), prefix="chat.")
            field = "chat.messages"
        else:
            raise InvalidRequestError("text or chat must be given", field="input")
        tokenized = Request(
            request_id="",
            model=model.name,
            prompt=prompt,
            adds_special_tokens=request.add_special_tokens,
            fields={"prompt": field},
        )
        token_ids = await context_of_call.tokenise(tokenized) if prompt else []
        return pb.TokenizeResponse(token_ids=token_ids, context_tokens_max=model.context_tokens_max)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: ServicerContext[Any, Any]
    ) -> pb.DetokenizeResponse:
        model = self._model(request.model)
        if len(request.token_ids) > model.context_tokens_max:
            raise InvalidRequestError(f"token_ids must have at most {model.context_tokens_max} ids", field="token_ids")
        token_ids = checked_ids(list(request.token_ids), "token_ids", model)
        text = await self._pipeline.detokenise(
            token_ids, model, caller=rpc_caller.get(), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        caller = rpc_caller.get()
        models = [
            pb.Model(
                name=model.name,
                context_tokens_max=model.context_tokens_max,
                features=sorted(model.features),
                workers_ready=model.workers_ready,
                adapters=[adapter for adapter in model.adapters if caller.allows(adapter)],
            )
            for model in self._pipeline.models.served()
            if caller.allows(model.name)
        ]
        return pb.ListModelsResponse(models=models)

    def _model(self, name: str) -> ServedModel:
        return self._context().find_model(required_text(name, field="model", characters_max=MODEL_CHARACTERS_MAX))


async def _judge_long_constraint(options: pb.GenerationOptions) -> None:
    if options.sampling.HasField("constraint"):
        await judge_long(from_constraint(options.sampling.constraint, prefix="options.sampling."))


def _chat_response(
    request_id: str, update: AnswerUpdate, options: Options, *, reader: AnswerReader
) -> pb.ChatResponse | None:
    """Returns None if all the text may still become a tool call."""
    finish = update.ending.reason if update.ending is not None else None
    choice = update.choice
    parts = [*reader.push(choice, update.text, len(update.token_ids)), *(reader.flush(choice) if finish else ())]
    text = "".join(part for part in parts if isinstance(part, str))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    warnings = _warnings(parts)
    calls = _pieces(reader, choice, parts)
    if finish is FinishReason.STOP and reader.calls(choice):
        finish = FinishReason.TOOL_CALLS
    is_empty = not (text or reasoning or calls or warnings or finish or update.logprobs or options.returns_token_ids)
    if is_empty and not reader.is_plain:
        return None
    return to_chat_response(
        request_id,
        choice,
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        token_ids=update.token_ids if options.returns_token_ids else (),
        logprobs=update.logprobs,
        finish=finish,
        warnings=warnings,
    )


def _warnings(parts: Sequence[Part]) -> list[MeshError]:
    """Returns each reason once, in the order of occurrence."""
    reasons = dict.fromkeys(part.reason for part in parts if isinstance(part, Warned))
    return [InternalError(WARNINGS[reason], reason=reason) for reason in reasons]


def _pieces(reader: AnswerReader, choice: int, parts: Sequence[Part]) -> tuple[ToolCallPiece, ...]:
    """Returns one piece per call: its name if it begins here, and the new part of its arguments."""
    pieces: dict[int, ToolCallPiece] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            call_id = reader.call_id(choice, part)
            pieces[part.number] = ToolCallPiece(index=part.number, call_id=call_id, name=part.name, arguments="")
        elif isinstance(part, CallArguments):
            known = pieces.get(part.number) or ToolCallPiece(index=part.number, call_id="", name="", arguments="")
            pieces[part.number] = replace(known, arguments=known.arguments + part.text)
    return tuple(pieces.values())
