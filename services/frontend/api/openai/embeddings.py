"""POST /v1/embeddings."""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from aiohttp import web

from kvmesh.rpc.clients import EmbedResult
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.steering import steer
from services.frontend.api.openai.sampling import (
    Priority,
    Prompts,
    Truncation,
    UserName,
    prompt_list,
)
from services.frontend.api.request_body import Count, FieldError, ModelBody, read_body, refused
from services.frontend.api.run import RequestContext
from services.frontend.pipeline.embed import EmbedRequest
from services.frontend.pipeline.request import Request


async def serve_embeddings(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/embeddings."""
    request, form = await exchange.read_request(lambda values: read_embeddings(values, exchange.request_id))
    request = replace(request, asked=steer(request.asked, exchange))
    return exchange.json_response(await embeddings_answer(exchange, request, form))


async def embeddings_answer(context: RequestContext, request: EmbedRequest, form: str) -> dict[str, Any]:
    """Runs the request and returns the JSON body of its answer."""
    context.find_model(request.asked.model)
    result = await context.pipeline.embed(request, caller=context.caller, began_s=context.began_s)
    context.usage = result.usage
    return _embeddings_body(request.asked.model, result, form)


class EmbeddingRequest(ModelBody, kw_only=True):
    """The body."""

    input: Prompts
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: UserName | None = None
    priority: Priority | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    normalize: Annotated[Any, refused("vectors are normalised", True)] = None
    use_activation: Annotated[Any, refused("vectors are normalised", True)] = None
    messages: Annotated[Any, refused("use input")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", message="must be -1 or an integer of at least 1")


def read_embeddings(values: Mapping[str, Any], request_id: str) -> tuple[EmbedRequest, str]:
    """Reads a body. Returns the request and the format of its vectors."""
    body = read_body(EmbeddingRequest, values)
    asked = Request(
        request_id=request_id,
        model=body.model_name(),
        prompt="",
        priority=body.priority or 0,
        prompt_tokens_kept=body.truncate_prompt_tokens,
        adds_special_tokens=body.add_special_tokens is not False,
    )
    inputs = prompt_list(body.input, "input")
    return EmbedRequest(asked=asked, inputs=inputs, dimensions=body.dimensions), body.encoding_format or "float"


def _embeddings_body(model: str, result: EmbedResult, form: str) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector) if form == "base64" else list(vector)}
        for i, vector in enumerate(result.vectors)
    ]
    tokens = result.usage.prompt_tokens
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(vector: Sequence[float]) -> str:
    """Encodes 32-bit floats in the machine's byte order, which is little-endian on all supported machines."""
    return base64.b64encode(array("f", vector).tobytes()).decode("ascii")
