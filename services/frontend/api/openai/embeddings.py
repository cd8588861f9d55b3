"""POST /v1/embeddings: body in, vectors out."""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from aiohttp import web

from kvmesh.rpc.clients import EmbedResult
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.steering import steer
from services.frontend.api.openai.bodies import to_json
from services.frontend.api.openai.sampling import (
    Priority,
    Prompts,
    Truncation,
    UserName,
    checked_truncation,
    prompt_list,
)
from services.frontend.api.request_body import Count, ModelBody, read_body, refused
from services.frontend.pipeline.embed import EmbedRequest
from services.frontend.pipeline.request import Request


async def serve_embeddings(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/embeddings."""
    request, form = await exchange.read_request(lambda values: read_embeddings(values, exchange.request_id))
    request = replace(request, asked=steer(request.asked, exchange.request.headers, exchange.settings))
    exchange.model_name = exchange.pipeline.models.find(request.asked.model).name
    result = await exchange.pipeline.embed(request, began_s=exchange.began_s)
    exchange.usage = result.usage
    body = embeddings_body(request.asked.model, result, form)
    return web.Response(body=to_json(body), headers=exchange.headers, content_type="application/json")


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


def read_embeddings(values: Mapping[str, Any], request_id: str) -> tuple[EmbedRequest, str]:
    """The request and the form of its vectors."""
    body = read_body(EmbeddingRequest, values)
    asked = Request(
        request_id=request_id,
        model=body.model_name(),
        prompt="",
        priority=body.priority or 0,
        prompt_tokens_kept=checked_truncation(body.truncate_prompt_tokens),
        adds_special_tokens=body.add_special_tokens is not False,
    )
    inputs = prompt_list(body.input, "input")
    return EmbedRequest(asked=asked, inputs=inputs, dimensions=body.dimensions), body.encoding_format or "float"


def embeddings_body(model: str, result: EmbedResult, form: str) -> dict[str, Any]:
    """OpenAI's list of embeddings."""
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
    """32-bit floats as this machine writes them, which is little-endian on all that we run on."""
    return base64.b64encode(array("f", vector).tobytes()).decode("ascii")
