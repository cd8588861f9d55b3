"""POST /v1/embeddings: body in, vectors out."""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from kvmesh.rpc.clients import EmbedResult
from services.frontend.api.http.exchange import Exchange
from services.frontend.api.http.steering import steer
from services.frontend.api.openai.bodies import to_json
from services.frontend.api.openai.fields import INTEGER_MAX, Fields
from services.frontend.api.openai.sampling import TOKENS_MAX, read_inputs, read_truncation
from services.frontend.pipeline.embed import EmbedRequest
from services.frontend.pipeline.request import Request

FORMATS = ("float", "base64")


async def serve_embeddings(exchange: Exchange) -> web.StreamResponse:
    """POST /v1/embeddings."""
    request, form = read_embeddings(await exchange.read_object(), exchange.request_id)
    request = replace(request, asked=steer(request.asked, exchange.request.headers, exchange.settings))
    exchange.model_name = exchange.pipeline.models.find(request.asked.model).name
    result = await exchange.pipeline.embed(request, began_s=exchange.began_s)
    exchange.usage = result.usage
    body = embeddings_body(request.asked.model, result, form)
    return web.Response(body=to_json(body), headers=exchange.headers, content_type="application/json")


def read_embeddings(values: Mapping[str, Any], request_id: str) -> tuple[EmbedRequest, str]:
    """The request and the form of its vectors."""
    fields = Fields(values)
    model = fields.text("model", 256)
    if not model:
        raise fields.wrong("model", "a model's name")
    asked = Request(
        request_id=request_id,
        model=model,
        prompt="",
        priority=fields.integer("priority", -INTEGER_MAX, INTEGER_MAX) or 0,
        prompt_tokens_kept=read_truncation(fields),
        adds_special_tokens=fields.flag("add_special_tokens", True),
    )
    request = EmbedRequest(
        asked=asked,
        inputs=read_inputs(fields, "input"),
        dimensions=fields.integer("dimensions", 1, TOKENS_MAX),
    )
    form = fields.choice("encoding_format", FORMATS) or FORMATS[0]
    fields.text("user", 512)
    for name in ("normalize", "use_activation"):
        fields.refuse(name, "vectors are normalised", (True,))
    fields.refuse("messages", "use input")
    fields.finish()
    return request, form


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
